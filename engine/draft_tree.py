"""The draft tree: tokens proposed for one sequence, hung below its last decided token.

Node 0 is that token (the bonus token of the last round, already decided); a chain is a tree with
one child per node. Nodes are in topological order: a parent stands before its children.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class DraftTree:
    """Token ids and parents of the nodes.

    Attributes:
        tokens: token id of each node; `tokens[0]` is the root.
        parents: index of each node's parent; `parents[0] == -1`.
        depths: distance from the root; a node's position is the root's position plus its depth.
        scores: log-probability, by its drafter, of each node being reached and accepted (0 for the
            root, never above the parent's); None where the drafter gives none.
    """

    __slots__ = ("_children", "depths", "is_chain", "parents", "scores", "tokens")

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self.is_chain = True
        self.scores: list[float] | None = None
        self._children: dict[tuple[int, int], int] = {}

    @classmethod
    def chain(cls, root: int, tokens: Iterable[int]) -> DraftTree:
        tree = cls(root)
        node = 0
        for token in tokens:
            node = tree.add(node, token)
        return tree

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_drafted(self) -> int:
        return len(self.tokens) - 1

    def add(self, parent: int, token: int) -> int:
        """Hang `token` below node `parent`; returns the node, which may exist already."""
        key = (parent, token)
        node = self._children.get(key)
        if node is None:
            node = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.is_chain = self.is_chain and parent == node - 1
            self._children[key] = node
        return node

    def add_path(self, tokens: Sequence[int], *, max_nodes: int) -> None:
        """Merge a path from the root, as far as `max_nodes` nodes (root included) allow."""
        node = 0
        for token in tokens:
            if len(self.tokens) >= max_nodes and (node, token) not in self._children:
                return
            node = self.add(node, token)

    def pruned(self, kept: Sequence[bool]) -> DraftTree:
        """The tree of the drafted nodes marked in `kept` (the root stays), which must hold the
        parent of each."""
        tree = DraftTree(self.tokens[0])
        nodes = {0: 0}
        scores = [0.0]
        for node, keep in enumerate(kept, start=1):
            if keep:
                nodes[node] = tree.add(nodes[self.parents[node]], self.tokens[node])
                scores.append(0.0 if self.scores is None else self.scores[node])
        tree.scores = None if self.scores is None else scores
        return tree

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`, if any."""
        return self._children.get((node, token))

    def visibility(self) -> Tensor:
        """`[nodes, nodes]` bool: row i sees column j when j is i or an ancestor of i."""
        n = len(self.tokens)
        if self.is_chain:
            return torch.ones(n, n, dtype=torch.bool).tril_()
        rows: list[list[bool]] = []
        for node, parent in enumerate(self.parents):
            row = list(rows[parent]) if parent >= 0 else [False] * n
            row[node] = True
            rows.append(row)
        return torch.tensor(rows)
