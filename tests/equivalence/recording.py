"""What both recording scripts share: random weights, the targets' texts, and files of drafts.

Needs torch, transformers and safetensors only, so it runs in the environments of either reference.
Weights are seeded and drawn wide enough that distributions are neither flat nor one-hot; a text or
a set of drafts in which two tokens are nearly tied is refused, since it could come out either way.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

FIXTURES = Path(__file__).resolve().parent / "fixtures"
VOCAB, HIDDEN = 96, 32
MASK = 95
EOS = 2
PROMPT = (17, 63, 5, 88, 41, 30, 9, 72, 54, 26, 11, 47)
NEW_TOKENS = 40
SMALLEST_GAP = 2e-3
# Most that logits may move when features are jittered by 1e-6: a drafter that amplifies rounding
# more than that differs from itself by what a comparison within 1e-4 is meant to find.
STEADY = 7e-5


def randomise(module: nn.Module, seed: int, *, scale: float = 0.25) -> None:
    """Draw every floating-point parameter anew: matrices around 0, norm weights around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1 and "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif "embed" in name or "lm_head" in name:
                parameter.copy_(0.6 * noise)
            else:
                parameter.copy_(scale * noise)


def smallest_gap(logits: Tensor) -> float:
    """The smallest difference between the best and the second-best logit of any row."""
    best = logits.flatten(0, -2).topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


@dataclass
class Text:
    """A target, its greedy continuation of `PROMPT`, and its hidden states at every position.

    Attributes:
        tokens: `[PROMPT + NEW_TOKENS]`.
        beyond: the continuation further on, for labels of blocks that reach past the end.
        hidden_states: `[tokens + beyond, hidden]` each, in Hugging Face indexing.
    """

    name: str
    model: PreTrainedModel
    tokens: list[int] = field(default_factory=list)
    beyond: list[int] = field(default_factory=list)
    hidden_states: tuple[Tensor, ...] = ()

    @classmethod
    @torch.no_grad()
    def of(cls, name: str, beyond: int = 16) -> Text:
        """The text of the target in `fixtures/targets/<name>`."""
        folder = FIXTURES / "targets" / name
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokens, logits = greedy(model, NEW_TOKENS + beyond)
        size = len(PROMPT) + NEW_TOKENS
        assert smallest_gap(logits[:NEW_TOKENS]) > SMALLEST_GAP
        assert not {MASK, EOS} & set(tokens)
        output = model(torch.tensor([tokens]), output_hidden_states=True)
        states = tuple(state[0] for state in output.hidden_states)
        return cls(name, model, tokens[:size], tokens[size:], states)

    @property
    def prefixes(self) -> range:
        """The prefix lengths at which a round may start: token `n - 1` is the bonus token."""
        return range(len(PROMPT) + 1, len(self.tokens) + 1)

    def features(self, layers: list[int], rows: int) -> Tensor:
        """`[rows, len(layers) * hidden]`: these hidden states of the first `rows` positions."""
        return torch.cat([self.hidden_states[layer][:rows] for layer in layers], dim=-1)

    def jittered(self) -> Text:
        """The same text with hidden states that are off by what float32 rounding amounts to."""
        generator = torch.Generator().manual_seed(0)
        states = tuple(
            state * (1 + 1e-6 * torch.randn(state.shape, generator=generator))
            for state in self.hidden_states
        )
        return replace(self, hidden_states=states)

    def accepted(self, n: int, draft: list[int]) -> int:
        """How many tokens of a draft made at prefix length `n` are the target's own."""
        for count, (token, wanted) in enumerate(
            zip(draft, (self.tokens + self.beyond)[n:], strict=False)
        ):
            if token != wanted:
                return count
        return len(draft)


@torch.no_grad()
def greedy(model: PreTrainedModel, count: int) -> tuple[list[int], Tensor]:
    """`PROMPT` and `count` more tokens, by one plain forward each, and the logits behind them."""
    tokens, rows = list(PROMPT), []
    for _ in range(count):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        rows.append(logits)
        tokens.append(int(logits.argmax()))
    return tokens, torch.stack(rows)


@dataclass
class Drafts:
    """What a reference drafts at each prefix length of a text.

    Attributes:
        draft_tokens: `[prefixes, drafted]`, target token ids.
        logits: `[prefixes, drafted, draft_vocab]`.
    """

    draft_tokens: Tensor
    logits: Tensor

    def accepted(self, text: Text) -> list[int]:
        return [
            text.accepted(n, row.tolist())
            for n, row in zip(text.prefixes, self.draft_tokens, strict=True)
        ]

    def mixed(self, text: Text) -> bool:
        """Whether rejections at once, partial acceptances and long ones all occur, without ties."""
        counts = self.accepted(text)
        at_once = sum(count == 0 for count in counts)
        return (
            0.15 * len(counts) <= at_once <= 0.7 * len(counts)
            and sum(count >= 3 for count in counts) >= 4
            and smallest_gap(self.logits) > SMALLEST_GAP
        )

    def steady(self, jittered: Drafts) -> bool:
        """Whether drafts from jittered features are the same, within `STEADY`."""
        return float((self.logits - jittered.logits).abs().max()) < STEADY

    def write(self, folder: Path, text: Text, extra: dict[str, Tensor] | None = None) -> None:
        """Write `recorded.safetensors` beside the checkpoint in `folder`."""
        tensors = {
            "tokens": torch.tensor(text.tokens),
            "draft_tokens": self.draft_tokens,
            "logits": self.logits.float(),
            **(extra or {}),
        }
        metadata = {"target": text.name, "prompt_tokens": str(len(PROMPT))}
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            folder / "recorded.safetensors",
            metadata=metadata,
        )
        print(
            f"{folder.name}: acceptances {self.accepted(text)}, "
            f"smallest gap {smallest_gap(self.logits):.4f}"
        )
