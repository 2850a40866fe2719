"""Draft trees: who sees whom, merging under a node budget, chains and depths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from whiflash_agents.engine.draft_tree import DraftTree

# (which of the nodes so far, token): few tokens, so that the same child is often added twice
additions = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 3)), max_size=24)
paths = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8)


def grown(steps: list[tuple[int, int]]) -> DraftTree:
    tree = DraftTree(9)
    for choice, token in steps:
        tree.add(choice % len(tree), token)
    return tree


def ancestry(tree: DraftTree, node: int) -> list[int]:
    """The node, its parent, and so on up to the root."""
    line = [node]
    while tree.parents[line[-1]] != -1:
        line.append(tree.parents[line[-1]])
    return line


@given(additions)
def test_a_node_sees_itself_and_its_ancestors_and_nothing_else(
    steps: list[tuple[int, int]],
) -> None:
    tree = grown(steps)
    visible = tree.visibility().tolist()
    for node in range(len(tree)):
        line = ancestry(tree, node)
        assert [i for i, seen in enumerate(visible[node]) if seen] == sorted(line)


@given(additions)
def test_depths_parents_and_children_describe_the_same_tree(steps: list[tuple[int, int]]) -> None:
    tree = grown(steps)
    assert tree.parents[0] == -1
    assert tree.num_drafted == len(tree) - 1 == len(tree.parents) - 1 == len(tree.depths) - 1
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        assert 0 <= parent < node  # topological order
        assert tree.depths[node] == len(ancestry(tree, node)) - 1
        assert tree.child(parent, tree.tokens[node]) == node
    for node in range(len(tree)):
        children = {tree.tokens[i] for i, parent in enumerate(tree.parents) if parent == node}
        for token in range(5):
            assert (tree.child(node, token) is not None) == (token in children)


@given(additions)
def test_a_chain_is_recognised_whenever_it_is_one(steps: list[tuple[int, int]]) -> None:
    tree = grown(steps)
    assert tree.is_chain == (tree.parents == list(range(-1, len(tree) - 1)))


def test_adding_a_child_that_exists_returns_it() -> None:
    tree = DraftTree(9)
    first = tree.add(0, 5)
    assert tree.add(0, 5) == first
    assert len(tree) == 2
    assert tree.is_chain  # nothing was hung beside it


def test_chain_follows_its_tokens() -> None:
    tree = DraftTree.chain(9, [4, 4, 7])
    assert tree.tokens == [9, 4, 4, 7]
    assert tree.parents == [-1, 0, 1, 2]
    assert tree.depths == [0, 1, 2, 3]
    assert tree.is_chain
    assert len(DraftTree.chain(9, [])) == 1


@given(paths, st.integers(1, 14))
def test_paths_merge_where_they_agree_and_stop_at_the_node_budget(
    given_paths: list[list[int]], budget: int
) -> None:
    tree = DraftTree(9)
    # The model: a set of prefixes; a path ends at the first prefix there is no room for.
    prefixes: list[tuple[int, ...]] = [()]
    for path in given_paths:
        tree.add_path(path, max_nodes=budget)
        for end in range(1, len(path) + 1):
            prefix = tuple(path[:end])
            if prefix not in prefixes:
                if len(prefixes) == budget:
                    break
                prefixes.append(prefix)
    spelled = [
        tuple(tree.tokens[i] for i in reversed(ancestry(tree, node)[:-1]))
        for node in range(len(tree))
    ]
    assert spelled == prefixes
    assert len(tree) <= budget
