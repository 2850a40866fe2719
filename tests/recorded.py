"""What other implementations draft, as recorded in `equivalence/fixtures` (see its README).

`recorded(name)` gives a target, a drafter's checkpoint in the other package's own format, a text,
and the drafts that the package makes after every prefix of that text: whatever schedule of
rejections, switches and catch-ups leads a drafter to a prefix, it must draft these.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from whiflash_agents.engine.target import Target

FIXTURES = Path(__file__).resolve().parent / "equivalence" / "fixtures"
NAMES = sorted(
    file.parent.relative_to(FIXTURES).as_posix() for file in FIXTURES.glob("*/*/recorded.*")
)
EAGLE3 = [name for name in NAMES if name.startswith("speculators/eagle3")]
DFLASH = [name for name in NAMES if name not in EAGLE3]
Z_LAB = [name for name in DFLASH if name.startswith("dflash/")]


@dataclass(frozen=True)
class Recorded:
    """One drafter, one text, and what the reference makes of them, all in float32.

    Attributes:
        target: as the engine drives it; shared by all recordings of that target.
        plain: the same weights as a plain transformers model; shared, too.
        checkpoint: folder of the drafter.
        tokens: the prompt and the target's greedy continuation.
        prompt_tokens: how many of them are the prompt.
        hidden_states: `[tokens, hidden]` each, of `tokens`, in Hugging Face indexing.
        draft_tokens: `[prefixes, drafted]`, target token ids; EAGLE-3's are its greedy chain.
        logits: `[prefixes, drafted, draft_vocab]`.
        generated: what the reference's own generation returned, prompt included, or None.
        acceptance_lengths: tokens that each of its rounds produced, bonus token included, from the
            first round on, as long as rounds have full blocks and begin within `tokens`; or None.
    """

    target: Target
    plain: PreTrainedModel
    checkpoint: Path
    tokens: list[int]
    prompt_tokens: int
    hidden_states: tuple[Tensor, ...]
    draft_tokens: Tensor
    logits: Tensor
    generated: list[int] | None
    acceptance_lengths: list[int] | None

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.prompt_tokens]

    @property
    def prefixes(self) -> range:
        """Lengths n of the prefixes of `tokens` that have drafts: token n - 1 is the bonus token,
        target features of positions 0 to n - 2 are known."""
        return range(self.prompt_tokens + 1, len(self.tokens) + 1)

    def drafts(self, n: int) -> tuple[list[int], Tensor]:
        """Tokens and logits `[drafted, draft_vocab]` of the draft after `n` tokens."""
        row = n - self.prefixes.start
        return self.draft_tokens[row].tolist(), self.logits[row]

    def features(self, layers: tuple[int, ...], n: int) -> Tensor:
        """`[n - 1, len(layers) * hidden]`: what a drafter may know after `n` tokens."""
        return torch.cat([self.hidden_states[layer][: n - 1] for layer in layers], dim=-1)

    def embed(self, token_ids: list[int] | Tensor) -> Tensor:
        """The target's embeddings, `[tokens, hidden]`."""
        return self.plain.get_input_embeddings()(torch.as_tensor(token_ids))


def plain_target(name: str) -> PreTrainedModel:
    """A target as transformers loads it."""
    folder = FIXTURES / "targets" / name
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def _targets(name: str) -> tuple[Target, PreTrainedModel]:
    return Target(plain_target(name), name=name), plain_target(name)


@cache
def recorded(name: str) -> Recorded:
    """The recording `name`, one of `NAMES`: `<package>/<variant>`."""
    folder = FIXTURES / name
    with safe_open(folder / "recorded.safetensors", framework="pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    target, plain = _targets(metadata["target"])
    with torch.inference_mode():
        output = plain(tensors["tokens"][None], output_hidden_states=True, use_cache=False)
    generated, lengths = tensors.get("generated"), tensors.get("acceptance_lengths")
    return Recorded(
        target=target,
        plain=plain,
        checkpoint=folder,
        tokens=tensors["tokens"].tolist(),
        prompt_tokens=int(metadata["prompt_tokens"]),
        hidden_states=tuple(state[0] for state in output.hidden_states),
        draft_tokens=tensors["draft_tokens"],
        logits=tensors["logits"],
        generated=None if generated is None else generated.tolist(),
        acceptance_lengths=None if lengths is None else lengths.tolist(),
    )
