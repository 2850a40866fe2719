"""Training of EAGLE-3 by training-time test (Li et al., 2503.01840, section 3.2).

The network is trained on what it meets while drafting: from every position of a response it drafts
a chain of `steps` along the true text, its own outputs taking the place of the target's features
from the second step on. All chains of a text run at once, and each step is what `Eagle3Drafter`
computes there: the chain that begins at row s sees the true rows up to s and its own rows, whose
RoPE positions are s + 1, s + 2, ... As in SafeAILab's training, the loss is soft cross-entropy
against the target's distribution over the draft vocabulary, step j counts `decay ** j`, and
positions whose likeliest token is outside the draft vocabulary do not count.

Rows of prompts need keys and values only (KV-only prefill, WhiFlash, 2606.07710, section 3.4):
queries, MLP and logits are computed where a response is drafted. That is exact, and the larger part
of the time is saved where prompts are long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from ..drafters.eagle3_model import Eagle3Model
from ..errors import SettingsError
from ..sampling import greedy
from ..target import Target
from .draft_attention import attend_drafts
from .draft_figures import draft_figures
from .head_loss import FrozenHead, head_loss, pieces, precise, softmax
from .objective import Loss
from .vocabulary import draft_ids

if TYPE_CHECKING:
    from .feature_source import FeatureSource
    from .texts import TrainingText


@dataclass(slots=True)
class Chains:
    """The drafts of one text, those first that the text follows for longer.

    Attributes:
        starts: `[chains]`, int64, row of the first step: the last true one.
        steps: `[chains]`, int64, steps whose token the response still has; descending, at least 1.
    """

    starts: Tensor
    steps: Tensor

    def going(self, step: int) -> int:
        """Chains that have a step number `step`, from 0; they stand first."""
        return int((self.steps > step).sum())


class Eagle3Objective:
    """The loss of an EAGLE-3 network on texts of its target.

    Args:
        network: to be trained; float32.
        target: its embedding and head are used as they are.
        source: of features; it must give the layers of `network.config.feature_layers`.
        steps: of each chain.
        decay: what each step counts, as a share of the one before.
        max_rows: chains of one text, which bounds the memory; of more, so many are drawn.

    Raises:
        SettingsError: a setting out of range.
    """

    def __init__(
        self,
        network: Eagle3Model,
        target: Target,
        source: FeatureSource,
        *,
        steps: int = 7,
        decay: float = 0.8,
        max_rows: int = 512,
    ) -> None:
        for name, value in (("steps", steps), ("max_rows", max_rows)):
            if not isinstance(value, int) or value < 1:
                raise SettingsError(f"{name}={value!r}: expected an integer of at least 1")
        if not 0.0 < decay <= 1.0:
            raise SettingsError(f"decay={decay!r}: expected a number above 0 and up to 1")
        self.network: nn.Module = network
        self._eagle = network
        self.target, self.source = target, source
        self.steps, self.decay, self.max_rows = steps, decay, max_rows
        self._teacher = FrozenHead(target)

    def loss(self, text: TrainingText, generator: torch.Generator) -> Loss:
        """The loss over all chains of `text`. A text without a response of two tokens or more has
        none, and weight 0."""
        network = self._eagle
        chains = self.chains(text, generator)
        if not len(chains.starts):
            return Loss(network.norm.weight.sum() * 0.0, 0.0)
        found = self.source(text)
        true = torch.cat([found.features[i] for i in network.config.feature_layers], dim=-1)
        hidden = torch.cat(self.unroll(true, found.token_ids, chains))
        # Of every row: its step, chain, and the position at which the target says what is right.
        counts = [chains.going(j) for j in range(int(chains.steps[0]))]
        device = hidden.device
        step = torch.repeat_interleave(torch.tensor(counts)).to(device)
        chain = torch.cat([torch.arange(n) for n in counts]).to(device)
        positions = chains.starts.to(device)[chain] + step + 1
        where, of_row = positions.unique(return_inverse=True)
        wanted, best = self._teach(found.hidden[where])
        weights = self.decay ** step.to(wanted.dtype) * (best >= 0)[of_row]
        chosen: list[int] = []

        def loss_of(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            chosen.extend(greedy(logits))
            expected, weight = wanted[of_row[rows]], weights[rows, None]
            chances, normaliser = softmax(logits)
            losses = normaliser - (expected * logits).sum(-1, keepdim=True)
            return (losses * weight).sum(), chances.sub_(expected).mul_(weight)

        if not network.config.norm_output:
            hidden = network.norm(hidden)
        total = head_loss(
            network.head,
            hidden,
            loss_of,
            width=network.config.draft_vocab_size,
            parameters=(network.head.lm_head.weight,),
        )
        correct = torch.zeros(counts[0], self.steps, dtype=torch.bool, device=device)
        drafted = torch.zeros_like(correct)
        correct[chain, step] = torch.tensor(chosen, device=device) == best[of_row]
        drafted[chain, step] = True
        figures = draft_figures(correct, drafted)
        figures["coverage"] = (float((best >= 0).sum()), float(len(best)))
        return Loss(total, float(weights.sum()), figures)

    def chains(self, text: TrainingText, generator: torch.Generator) -> Chains:
        """The chains that a text has: one from every token of a response but its last."""
        starts, steps = [], []
        for start, end in text.responses:
            # Row s holds token s + 1, the bonus token, and says what token s + 2 is.
            rows = torch.arange(start - 1, end - 2)
            starts.append(rows)
            steps.append((end - 2 - rows).clamp(max=self.steps))
        if not starts:
            return Chains(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
        first, room = torch.cat(starts), torch.cat(steps)
        if len(first) > self.max_rows:
            drawn = torch.randperm(len(first), generator=generator)[: self.max_rows].sort().values
            first, room = first[drawn], room[drawn]
        order = room.argsort(descending=True, stable=True)
        return Chains(first[order], room[order])

    def unroll(self, features: Tensor, token_ids: Tensor, chains: Chains) -> list[Tensor]:
        """Outputs of every step, `[chains.going(step), hidden]`: what `Eagle3Model.logits` takes.

        Args:
            features: `[tokens, layers * target_hidden]`, of the text.
            token_ids: `[tokens]`, the text; its tokens are embedded as if they had been drafted.
        """
        network = self._eagle
        attention, window = network.midlayer.self_attn, network.config.layer.window(0)
        rows = int(chains.starts.max()) + 1
        starts = chains.starts.to(token_ids.device)
        every = torch.arange(rows, device=starts.device)
        dtype = network.fc.weight.dtype
        projected = network.project(features[:rows].to(dtype))
        x, residual = network.attention_input(self._embed(token_ids[1 : rows + 1]), projected)
        x = x.to(dtype)
        text = attention.keys_values(x, network.rotary(every, dtype))
        visible = every <= starts[:, None]
        if window is not None:
            # All steps see what the last true row sees, as while drafting (`eagle3.py`, `_row`).
            visible &= starts[:, None] - every < window
        query = attention.queries(x[starts], network.rotary(starts, dtype))
        residual = residual[starts]
        own_keys, own_values = (
            part.new_zeros(len(part), len(starts), 0, attention.head_dim) for part in text
        )
        outputs: list[Tensor] = []
        for step in range(int(chains.steps[0])):
            if step:
                going = chains.going(step)
                at = starts[:going] + step
                embedded = self._embed(token_ids[at + 1])
                x, residual = network.attention_input(embedded, outputs[-1][:going])
                rotation = network.rotary(at, dtype)
                query = attention.queries(x, rotation)
                keys, values = attention.keys_values(x, rotation)
                own_keys = torch.cat((own_keys[:, :going], keys.unsqueeze(2)), dim=2)
                own_values = torch.cat((own_values[:, :going], values.unsqueeze(2)), dim=2)
                visible = visible[:going]
            attended = attend_drafts(
                query.unsqueeze(1), text, (own_keys, own_values), visible.unsqueeze(1)
            )
            outputs.append(network.finish(attended.squeeze(1), residual))
        return outputs

    def _embed(self, token_ids: Tensor) -> Tensor:
        own = self._eagle.embed_tokens
        table = self.target.embedding.detach() if own is None else own.weight
        return embedding(token_ids, table).to(self._eagle.fc.weight.dtype)

    @torch.no_grad()
    def _teach(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the target says behind each of `hidden` `[positions, hidden]`: probabilities over
        the draft vocabulary, `[positions, draft_vocab]`, and the likeliest token as a draft id,
        `[positions]`, -1 where it is outside."""
        network = self._eagle
        vocab = network.config.vocab_size
        offsets = network.head.d2t
        known = (
            None
            if offsets is None
            else network.head.target_ids(torch.arange(len(offsets), device=offsets.device))
        )
        ids = draft_ids(offsets, vocab).to(hidden.device)
        wanted, best = [], []
        with torch.autocast(hidden.device.type, enabled=False):
            for part in pieces(len(hidden), vocab):
                logits = self._teacher(hidden[part])
                best.append(ids[greedy(logits)])
                reduced = logits if known is None else logits.index_select(1, known)
                wanted.append(precise(reduced).softmax(-1))
        return torch.cat(wanted), torch.cat(best)
