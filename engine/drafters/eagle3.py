"""The `eagle3` drafter: an autoregressive tree, one level per step (Li et al., 2503.01840).

The last context row gives the first level; each further level expands the `top_k` likeliest nodes
of the one before. In the end the likeliest `total_tokens` of all candidates are kept. Keys and
values of drafted rows are scratch behind the context: only rows made from true target features
stay. Network: `eagle3_model.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from ..attention import PackedRow, attend_rows
from ..draft_tree import DraftTree
from ..errors import SettingsError
from ..kv_cache import PlaneShape
from ..sequence import SequenceState
from .base import DraftLimit
from .candidates import Coupling, rank
from .context import Backlog, ContextDrafter, DraftContext
from .eagle3_model import Eagle3Model


class Eagle3Context(DraftContext):
    """The context of an EAGLE-3 network: keys and values of its one layer.

    Rows depend on nothing but the layer's input, so a backlog needs projection, norms, keys and
    values alone (KV-only prefill, exact); the last row's layer is run when a draft begins.
    """

    name = "eagle3"
    lookahead = 1  # row t holds token t + 1

    def __init__(self, model: Eagle3Model, *, depth: int, top_k: int) -> None:
        super().__init__()
        self.model = model
        layer = model.config.layer
        self.feature_layers = model.config.feature_layers
        self.plane_shape = PlaneShape(1, layer.num_kv_heads, layer.head_dim)
        self.scratch = (depth - 1) * top_k
        self.span = depth - 1
        self.max_positions = layer.max_positions

    def embed(self, tokens: Tensor) -> Tensor:
        """`[rows]` -> `[rows, hidden]`."""
        own = self.model.embed_tokens
        return embedding(tokens, self.target.embedding if own is None else own.weight)

    def _consume(self, backlog: Backlog) -> Sequence[Tensor | None]:
        model = self.model
        tokens: list[int] = []
        counts = []
        for sequence, start, end in zip(
            backlog.sequences, backlog.starts, backlog.ends, strict=True
        ):
            tokens += sequence.tokens[start + 1 : end + 1]
            counts.append(end - start)
        projected = model.project(backlog.features)
        embedded = self.embed(torch.tensor(tokens, device=projected.device))
        x, residual = model.attention_input(embedded, projected)
        rotation = model.rotary(backlog.positions, x.dtype)
        self._write(x, rotation, backlog.targets)
        if self.full_prefill:
            rows = [
                PackedRow(s.extent.start, start, end - start)
                for s, start, end in zip(
                    backlog.sequences, backlog.starts, backlog.ends, strict=True
                )
                if s.extent is not None
            ]
            model.finish(self._attend(x, rotation, rows), residual)
        # Cloned: a view would keep the whole backlog's projection alive.
        return [part[-1].clone() for part in projected.split(counts)]

    def _write(self, x: Tensor, rotation: tuple[Tensor, Tensor], targets: Tensor) -> None:
        keys, values = self.model.midlayer.self_attn.keys_values(x, rotation)
        self.plane.keys[0].index_copy_(1, targets, keys)
        self.plane.values[0].index_copy_(1, targets, values)

    def _attend(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], rows: Sequence[PackedRow]
    ) -> Tensor:
        query = self.model.midlayer.self_attn.queries(x, rotation).transpose(0, 1)[None]
        window = self.model.config.layer.window(0)
        out = attend_rows(query, self.plane.keys[0], self.plane.values[0], rows, None, window)
        return out[0].flatten(1)

    def first_step(self, sequences: Sequence[SequenceState]) -> Tensor:
        """The layer's output at the last context row of each sequence, `[sequences, hidden]`."""
        device = self.target.device
        last = torch.stack([_last(s, self.name) for s in sequences])
        bonus = torch.tensor([s.tokens[-1] for s in sequences], device=device)
        x, residual = self.model.attention_input(self.embed(bonus), last)
        positions = torch.tensor([s.num_cached - 1 for s in sequences], device=device)
        rows = [
            PackedRow(s.extent.start, s.num_cached - 1, 1)
            for s in sequences
            if s.extent is not None
        ]
        rotation = self.model.rotary(positions, x.dtype)
        return self.model.finish(self._attend(x, rotation, rows), residual)

    def next_step(
        self,
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        targets: Tensor,
        rows: Sequence[PackedRow],
    ) -> Tensor:
        """One drafted row per entry: feature `hidden` `[rows, hidden]` and token `[rows]`, written
        to scratch at `targets`; returns the layer's output `[rows, hidden]`."""
        x, residual = self.model.attention_input(self.embed(tokens), hidden)
        rotation = self.model.rotary(positions, x.dtype)
        self._write(x, rotation, targets)
        return self.model.finish(self._attend(x, rotation, rows), residual)


@dataclass(slots=True)
class _Candidates:
    """All candidates so far, level after level; `[sequences, candidates]` each. `parents` are
    indices of candidates, -1 for the root."""

    scores: list[Tensor]
    tokens: list[Tensor]
    parents: list[Tensor]

    @property
    def count(self) -> int:
        return sum(part.shape[1] for part in self.scores)


class Eagle3Drafter(ContextDrafter):
    """EAGLE-3's dynamic tree; a chain with `top_k=1`.

    Args:
        model: the network.
        depth: levels of the tree.
        top_k: nodes of a level that are expanded, and children of each (all, where the draft
            vocabulary has fewer tokens).
        total_tokens: nodes that are kept, without the root.

    Raises:
        SettingsError: a setting below 1.
    """

    name = "eagle3"
    context: Eagle3Context

    def __init__(
        self, model: Eagle3Model, *, depth: int = 8, top_k: int = 10, total_tokens: int = 60
    ) -> None:
        for name, value in (("depth", depth), ("top_k", top_k), ("total_tokens", total_tokens)):
            if not isinstance(value, int) or value < 1:
                raise SettingsError(f"eagle3: {name}={value!r}; expected an integer of at least 1")
        self.depth = depth
        self.top_k = min(top_k, model.config.draft_vocab_size)
        self.total_tokens = total_tokens
        self.context = Eagle3Context(model, depth=depth, top_k=self.top_k)

    @torch.inference_mode()
    def draft(
        self, sequences: Sequence[SequenceState], limits: Sequence[DraftLimit]
    ) -> list[DraftTree]:
        trees = [DraftTree(s.tokens[-1]) for s in sequences]
        budgets = [min(self.total_tokens, limit.nodes) for limit in limits]
        depths = [min(self.depth, limit.depth, n) for limit, n in zip(limits, budgets, strict=True)]
        able = [i for i, depth in enumerate(depths) if depth > 0]
        if not able:
            return trees
        found = self._expand([sequences[i] for i in able], max(depths))
        scores = torch.cat(found.scores, dim=1)
        # Stable: of equal scores the parent, which stands before, is kept first.
        order = scores.sort(dim=1, descending=True, stable=True).indices.tolist()
        known = scores.tolist()
        tokens = torch.cat(found.tokens, dim=1).tolist()
        parents = torch.cat(found.parents, dim=1).tolist()
        for row, i in enumerate(able):
            within = self.top_k + (depths[i] - 1) * self.top_k**2
            kept = [c for c in order[row] if c < within][: budgets[i]]
            nodes, chances = {-1: 0}, [0.0]
            for c in sorted(kept):
                nodes[c] = trees[i].add(nodes[parents[row][c]], tokens[row][c])
                chances.append(known[row][c])
            trees[i].scores = chances
        return trees

    def _expand(self, sequences: Sequence[SequenceState], depth: int) -> _Candidates:
        """Candidates of levels 1 to `depth`: `top_k` on the first, `top_k` squared on the others.

        A sequence's own limits are applied afterwards, so that what it gets does not depend on who
        else is in the batch.
        """
        context, k, device = self.context, self.top_k, self.context.target.device
        target_ids = context.model.head.target_ids
        coupling = Coupling.of(sequences, device)
        lengths = torch.tensor([len(s.tokens) for s in sequences], device=device)
        starts = torch.tensor(
            [s.extent.start for s in sequences if s.extent is not None], device=device
        )
        count = len(sequences)

        hidden = context.first_step(sequences)
        logits = context.model.logits(hidden)
        scores, tokens = rank(logits, k, lengths, coupling, target_ids)
        root = torch.full((count, k), -1, device=device)
        found = _Candidates([scores], [tokens], [root])
        hidden = hidden.repeat_interleave(k, dim=0)  # every node's feature is its parent's output
        beam = torch.arange(k, device=device).expand(count, k)  # the nodes to expand
        wide = coupling.repeat(k)
        lineage = torch.zeros(count, k, 0, dtype=torch.bool)
        above = beam.cpu()
        for level in range(1, depth):
            # Level `level` becomes rows: they see the context, their ancestors and themselves.
            lineage = torch.cat(
                (
                    lineage.gather(1, above[:, :, None].expand(-1, -1, lineage.shape[2])),
                    torch.eye(k, dtype=torch.bool).expand(count, k, k),
                ),
                dim=2,
            )
            written = (level - 1) * k
            slots = torch.arange(written, written + k, device=device)
            hidden = context.next_step(
                hidden,
                tokens.flatten(),
                (lengths + level - 2).repeat_interleave(k),
                (starts + lengths - 1).repeat_interleave(k) + slots.repeat(count),
                [self._row(s, lineage[i], level) for i, s in enumerate(sequences)],
            )
            logits = context.model.logits(hidden)
            positions = (lengths + level).repeat_interleave(k)
            child_scores, children = rank(logits, k, positions, wide, target_ids)
            total = (scores.flatten()[:, None] + child_scores).view(count, k * k)
            children = children.view(count, k * k)
            offset = found.count
            found.scores.append(total)
            found.tokens.append(children)
            found.parents.append(beam.repeat_interleave(k, dim=1))
            if level + 1 == depth:
                break
            scores, chosen = total.topk(k)
            tokens = children.gather(1, chosen)
            beam = chosen + offset
            parent = chosen // k
            hidden = hidden.view(count, k, -1)
            hidden = hidden.gather(1, parent[:, :, None].expand_as(hidden)).flatten(0, 1)
            above = parent.cpu()
        return found

    def _row(self, sequence: SequenceState, lineage: Tensor, level: int) -> PackedRow:
        assert sequence.extent is not None
        first, k = len(sequence.tokens) - 1, self.top_k
        row = PackedRow(sequence.extent.start, first + (level - 1) * k, k)
        sliding = self.context.model.config.layer.window(0) is not None
        if k > 1 or sliding:
            row.tree = lineage
            # In a sliding layer all steps see what the last context row sees, whose position is
            # first - 1, and their ancestors: so it is trained (`speculators`).
            row.tail_positions = torch.full((level * k,), first - 1)
        return row


def _last(sequence: SequenceState, name: str) -> Tensor:
    last = sequence.contexts[name].last
    assert last is not None  # `consume` ran: the token after a reused prefix is always computed
    return last
