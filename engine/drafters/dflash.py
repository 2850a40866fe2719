"""The `dflash` drafter: a chain of tokens from one block-diffusion forward.

The block `[bonus, MASK, ...]` stands at the positions behind the context; every layer attends to
the context's keys and values in the KV arena and, without a causal mask, to the block's own, which
are written behind them as scratch. Network and source: `dflash_model.py`. Where the network has
them, a local head corrects the chain, and a length head tells how much of it to verify.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import embedding

from ..attention import PackedRow, attend_rows
from ..draft_tree import DraftTree
from ..kv_cache import PlaneShape
from ..sampling import greedy
from ..sequence import SequenceState
from .base import DraftLimit
from .candidates import Coupling, rank
from .context import Backlog, ContextDrafter, DraftContext
from .dflash_model import DFlashModel
from .length_head import adjusted, predicted, worth_verifying
from .local_chain import draft_chains


@dataclass(slots=True)
class BlockLogits:
    """What one block forward says, packed over sequences.

    Attributes:
        logits: `[rows, vocab]` over the drafter's vocabulary; rows of a sequence are its drafted
            slots in order.
        depths: rows of each sequence: how deep it may draft.
        positions: `[rows]`, position of the token that each row drafts.
        coupling: of the rows.
        slots: `[sequences, block_size, hidden]`, what enters the final norm at every slot.
    """

    logits: Tensor
    depths: list[int]
    positions: Tensor
    coupling: Coupling
    slots: Tensor


class DFlashContext(DraftContext):
    """The context of a DFlash network: per layer, keys and values of the projected features."""

    name = "dflash"
    lookahead = 0

    def __init__(self, model: DFlashModel) -> None:
        super().__init__()
        self.model = model
        config = model.config
        layers = config.layers
        self.feature_layers = config.feature_layers
        self.plane_shape = PlaneShape(layers.num_layers, layers.num_kv_heads, layers.head_dim)
        self.scratch = self.span = config.block_size
        self.max_positions = layers.max_positions

    def _consume(self, backlog: Backlog) -> Sequence[Tensor | None]:
        # Context rows have keys and values only, so there is no fuller way to make them.
        model, plane = self.model, self.plane
        rows = model.context(backlog.features)
        rotation = model.rotary(backlog.positions, rows.dtype)
        for index, layer in enumerate(model.decoder_layers()):
            keys, values = layer.self_attn.keys_values(rows, rotation)
            plane.keys[index].index_copy_(1, backlog.targets, keys)
            plane.values[index].index_copy_(1, backlog.targets, values)
        return [None] * len(backlog.sequences)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target token ids of the network's own."""
        head = self.model.head
        return draft_ids if head is None else head.target_ids(draft_ids)

    @torch.inference_mode()
    def block(self, sequences: Sequence[SequenceState], depths: Sequence[int]) -> BlockLogits:
        """One block forward for all `sequences`, whose contexts are complete.

        Args:
            depths: tokens wanted of each, from 1 to the block's `num_drafted`. It limits what the
                head computes, never the block that the network was trained on.
        """
        model, plane, device = self.model, self.plane, self.target.device
        config, size = model.config, model.config.block_size
        firsts = [s.num_cached for s in sequences]  # the bonus token's position
        starts = [s.extent.start for s in sequences if s.extent is not None]
        bonus = torch.tensor([s.tokens[-1] for s in sequences], device=device)
        table = self.target.embedding if model.embed_tokens is None else model.embed_tokens.weight
        hidden = embedding(model.block_tokens(bonus).flatten(), table) * config.embedding_scale
        slots = torch.arange(size)
        positions = (torch.tensor(firsts)[:, None] + slots).flatten().to(device)
        targets = positions + torch.tensor(starts, device=device).repeat_interleave(size)
        rotation = model.rotary(positions, hidden.dtype)
        rows: dict[int | None, list[PackedRow]] = {}
        for index, layer in enumerate(model.decoder_layers()):
            window = config.layers.window(index)
            if window not in rows:
                rows[window] = [
                    PackedRow(
                        start, first, size, tree=config.block_visible(index, first), causal=False
                    )
                    for start, first in zip(starts, firsts, strict=True)
                ]
            x = layer.input_layernorm(hidden)
            query = layer.self_attn.queries(x, rotation)
            keys, values = layer.self_attn.keys_values(x, rotation)
            plane.keys[index].index_copy_(1, targets, keys)
            plane.values[index].index_copy_(1, targets, values)
            attended = attend_rows(
                query.transpose(0, 1)[None],
                plane.keys[index],
                plane.values[index],
                rows[window],
                None,
                None,
            )
            hidden = layer.finish(attended[0].flatten(1), hidden)
        skipped = 0 if config.sample_from_anchor else 1
        wanted = [i * size + skipped + d for i, n in enumerate(depths) for d in range(n)]
        drafted = [first + 1 + d for first, n in zip(firsts, depths, strict=True) for d in range(n)]
        drafting = model.norm(hidden[wanted])
        logits = self.target.head(drafting) if model.head is None else model.head(drafting)
        coupling = Coupling.of(sequences, device)
        repeats = torch.tensor(depths, device=device)
        return BlockLogits(
            model.scale_logits(logits),
            list(depths),
            torch.tensor(drafted, device=device),
            Coupling(
                coupling.temperatures.repeat_interleave(repeats),
                coupling.seeds.repeat_interleave(repeats),
                coupling.sampled,
            ),
            hidden.unflatten(0, (len(sequences), size)),
        )


class DFlashDrafter(ContextDrafter):
    """The likeliest token of every slot, as a chain. Give it a model, or the context that it shares
    with another arm over the same network."""

    name = "dflash"
    context: DFlashContext

    def __init__(self, model: DFlashModel | DFlashContext) -> None:
        self.context = model if isinstance(model, DFlashContext) else DFlashContext(model)

    def draft(
        self, sequences: Sequence[SequenceState], limits: Sequence[DraftLimit]
    ) -> list[DraftTree]:
        most = self.context.model.config.num_drafted
        depths = [min(most, limit.depth, limit.nodes) for limit in limits]
        trees = [DraftTree(s.tokens[-1]) for s in sequences]
        able = [i for i, depth in enumerate(depths) if depth > 0]
        if not able:
            return trees
        drafting = [sequences[i] for i in able]
        block = self.context.block(drafting, [depths[i] for i in able])
        tokens, chances = self._choose(drafting, block)
        lengths = self._lengths(block)
        at = 0
        for i, depth, length in zip(able, block.depths, lengths, strict=True):
            # With a budget the prediction is one more thing that it decides by.
            kept = depth if length is None or self.scores else min(depth, worth_verifying(length))
            trees[i] = DraftTree.chain(sequences[i].tokens[-1], tokens[at : at + kept])
            if self.scores:
                scores = list(accumulate(chances[at : at + depth]))
                trees[i].scores = [0.0, *(scores if length is None else adjusted(scores, length))]
            at += depth
        return trees

    def _choose(
        self, sequences: Sequence[SequenceState], block: BlockLogits
    ) -> tuple[list[int], list[float]]:
        """The token of every row, and its score where there is need of one."""
        context, local = self.context, self.context.model.local_head
        if local is not None:
            bonus = torch.tensor([s.tokens[-1] for s in sequences], device=block.logits.device)
            return draft_chains(
                local,
                context.target.embedding,
                bonus,
                block.logits,
                block.depths,
                block.positions,
                block.coupling,
                context.target_ids,
                scored=self.scores,
            )
        if block.coupling.sampled or self.scores:
            known, best = rank(block.logits, 1, block.positions, block.coupling, context.target_ids)
            return best[:, 0].tolist(), known[:, 0].tolist()
        ids = torch.tensor(greedy(block.logits), device=block.logits.device)
        return context.target_ids(ids).tolist(), []

    @torch.inference_mode()
    def _lengths(self, block: BlockLogits) -> list[float] | list[None]:
        """Drafted tokens of each sequence that the length head expects to be accepted."""
        model = self.context.model
        if model.length_head is None:
            return [None] * len(block.depths)
        logits = model.length_head(model.norm(block.slots))
        return predicted(logits, model.config.num_drafted).tolist()
