"""Verification: which drafted tokens the target itself would have chosen.

One rule for every sampling mode (`SamplingParams`): at an accepted node, choose the target's token;
if a child carries it, descend; otherwise it is the bonus token. Since the choice depends only on
the logits, the parameters, the seed and the position, the output cannot depend on what was drafted
(Gumbel coupling: Daliri, Musco and Suresh, 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .draft_tree import DraftTree
from .sampling import LogitsError, Sampler, choose, greedy


@dataclass(slots=True)
class Walk:
    """The outcome for one tree.

    Attributes:
        path: accepted nodes from the root, `path[0] == 0`.
        tokens: the new tokens: those of `path[1:]`, then the bonus token.
        problem: why the logits at the last node admit no token; there is no bonus token then.
    """

    path: list[int]
    tokens: list[int]
    problem: str | None = None


def verify(
    logits: Tensor,
    trees: Sequence[DraftTree],
    first_rows: Sequence[int],
    samplers: Sequence[Sampler],
    positions: Sequence[int],
) -> list[Walk]:
    """Walk down every tree at once, level by level.

    Args:
        logits: `[rows, vocab]`, the target's logits at every node of every tree.
        trees: one per sequence.
        first_rows: the row of each tree's root; its nodes follow in order.
        samplers: one per sequence; each is advanced by the tokens chosen.
        positions: absolute position of the first token to choose, per sequence.

    Only nodes that the walk reaches are processed, except that plain greedy rows share one argmax.
    """
    walks = [Walk([0], []) for _ in trees]
    plain = [sampler.is_greedy_plain for sampler in samplers]
    if any(plain):
        tokens = greedy(logits)
        best = torch.tensor(tokens, device=logits.device).unsqueeze(-1)
        finite: list[bool] = logits.gather(-1, best).isfinite().flatten().tolist()
        for index, tree in enumerate(trees):
            if plain[index]:
                rows = slice(first_rows[index], first_rows[index] + len(tree))
                _descend_greedily(walks[index], tree, tokens[rows], finite[rows], samplers[index])

    active = [index for index in range(len(trees)) if not plain[index]]
    while active:
        rows_now = [first_rows[i] + walks[i].path[-1] for i in active]
        at = [positions[i] + len(walks[i].tokens) for i in active]
        try:
            chosen = choose(logits[rows_now], [samplers[i] for i in active], at)
        except LogitsError as error:
            # One sequence must not end the others: set it aside and choose for the rest.
            for row, problem in error.rows.items():
                walks[active[row]].problem = problem
            active = [i for i in active if walks[i].problem is None]
            continue
        still_active = []
        for i, token in zip(active, chosen, strict=True):
            samplers[i].advance(token)
            walks[i].tokens.append(token)
            child = trees[i].child(walks[i].path[-1], token)
            if child is not None:
                walks[i].path.append(child)
                still_active.append(i)
        active = still_active
    return walks


def _descend_greedily(
    walk: Walk,
    tree: DraftTree,
    best: Sequence[int],
    finite: Sequence[bool],
    sampler: Sampler,
) -> None:
    node: int | None = 0
    while node is not None:
        if not finite[node]:
            walk.problem = "the target's logits are NaN or infinite; load it as bfloat16 or float32"
            return
        sampler.advance(best[node])
        walk.tokens.append(best[node])
        node = tree.child(node, best[node])
        if node is not None:
            walk.path.append(node)
