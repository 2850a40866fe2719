"""How much of the drafts is verified: what raises the step's tokens per second, and no more."""

from __future__ import annotations

import math
import random
from itertools import chain, combinations
from typing import Any

import pytest
import tiny_drafters
from small_engines import ask, build, plain, text

from whiflash_agents.engine.budget import VerifyBudget
from whiflash_agents.engine.costs import CostModel, CostTable, Curve
from whiflash_agents.engine.draft_tree import DraftTree
from whiflash_agents.engine.drafters.registry import neural_drafters


def costs(per_token: float, base: float = 0.02) -> CostModel:
    return CostModel(CostTable(Curve([1, 1001], [base, base + 1000 * per_token])))


def random_tree(seed: int, nodes: int) -> DraftTree:
    """Children are less likely than their parents."""
    draw = random.Random(seed)
    tree = DraftTree(0)
    scores = [0.0]
    for token in range(1, nodes + 1):
        parent = draw.randrange(len(tree))
        tree.add(parent, token)
        scores.append(scores[parent] + math.log(draw.uniform(0.2, 0.95)))
    tree.scores = scores
    return tree


def cut(budget: VerifyBudget, trees: list[DraftTree], spent: float = 0.0) -> list[DraftTree]:
    ids = [str(i) for i in range(len(trees))]
    arms = ["eagle3"] * len(trees)
    contexts = [100] * len(trees)
    return budget.cut(trees, arms, ids, contexts, spent=spent, prompt_tokens=0)


def expected(trees: list[DraftTree]) -> float:
    return sum(sum(map(math.exp, tree.scores or [0.0])) for tree in trees)


def rate(trees: list[DraftTree], model: CostModel, spent: float) -> float:
    tokens = sum(map(len, trees))
    return expected(trees) / (spent + model.verify(tokens, tokens * 100))


@pytest.mark.parametrize("seed", range(12))
def test_what_is_kept_is_the_best_of_all_that_could_be_kept(seed: int) -> None:
    trees = [random_tree(seed, 4), random_tree(seed + 100, 3)]
    per_token = random.Random(seed).choice([1e-4, 1e-3, 4e-3, 1e-2, 5e-2])
    model = costs(per_token)
    got = cut(VerifyBudget(model), trees, spent=0.01)

    def closed(tree: DraftTree) -> list[list[bool]]:
        nodes = range(1, len(tree))
        subsets = chain.from_iterable(combinations(nodes, n) for n in range(len(tree)))
        return [
            [node in kept for node in nodes]
            for kept in map(set, subsets)
            if all(tree.parents[node] in kept | {0} for node in kept)
        ]

    best = max(
        rate([trees[0].pruned(a), trees[1].pruned(b)], model, 0.01)
        for a in closed(trees[0])
        for b in closed(trees[1])
    )
    assert math.isclose(rate(got, model, 0.01), best, rel_tol=1e-9)


def test_alone_where_verifying_is_nearly_free_all_is_verified_and_under_load_nothing() -> None:
    trees = [random_tree(7, 30)]
    assert len(cut(VerifyBudget(costs(1e-7)), trees)[0]) == 31
    crowd = [random_tree(i, 30) for i in range(16)]
    assert all(len(tree) == 1 for tree in cut(VerifyBudget(costs(0.1)), crowd))
    # In between, the likelier the drafts, the more of them.
    sizes = [sum(map(len, cut(VerifyBudget(costs(c)), trees))) for c in (1e-4, 2e-3, 1e-2)]
    assert sizes[0] > sizes[1] > sizes[2] > 1


def test_one_budget_goes_to_the_sequences_whose_drafts_are_likely() -> None:
    sure, doubtful = DraftTree.chain(0, range(1, 9)), DraftTree.chain(0, range(1, 9))
    sure.scores = [depth * math.log(0.95) for depth in range(9)]
    doubtful.scores = [depth * math.log(0.1) for depth in range(9)]
    kept = cut(VerifyBudget(costs(4e-3)), [sure, doubtful])
    assert len(kept[0]) > len(kept[1])


def test_probabilities_are_corrected_by_what_is_accepted() -> None:
    """A drafter that is far too sure of itself gets few nodes, now and then one to show better."""
    budget, sizes = VerifyBudget(costs(2e-3)), []
    for _ in range(60):
        tree = DraftTree.chain(0, range(1, 9))
        tree.scores = [depth * math.log(0.9) for depth in range(9)]
        sizes.append(len(cut(budget, [tree])[0]))
        budget.observe("0", "eagle3", 0)
    assert sizes[0] == 9
    assert sum(sizes[-20:]) <= 20 * 2
    for _ in range(60):
        tree = DraftTree.chain(0, range(1, 9))
        tree.scores = [depth * math.log(0.9) for depth in range(9)]
        sizes.append(len(cut(budget, [tree])[0]))
        budget.observe("0", "eagle3", sizes[-1] - 1)
    assert sizes[-1] == 9


def test_without_known_costs_all_is_verified() -> None:
    tree = random_tree(3, 10)
    assert len(cut(VerifyBudget(CostModel(CostTable())), [tree])[0]) == 11


def test_a_pruned_tree_keeps_parents_tokens_and_scores() -> None:
    tree = random_tree(5, 6)
    kept = [True] * 6
    kept[5] = False
    pruned = tree.pruned(kept)
    assert pruned.tokens == tree.tokens[:6]
    assert pruned.parents == tree.parents[:6]
    assert pruned.scores == (tree.scores or [])[:6]


@pytest.mark.parametrize("arm", ["eagle3", "dflash", "ddtree", "lookup"])
def test_output_does_not_depend_on_the_budget_and_the_budget_bites(arm: str) -> None:
    arms: dict[str, Any] = neural_drafters(
        eagle3=tiny_drafters.eagle3(), dflash=tiny_drafters.dflash(), eagle3_tokens=20
    )
    requests = [ask(f"{i}", text(i % 2, 20 + i), 24, temperature=i % 2, seed=i) for i in range(4)]
    engine = build(arm, arms, verify_budget="gain", max_draft_nodes=32, costs=costs(2e-3))
    for request, result in zip(requests, engine.generate(requests), strict=True):
        assert result.token_ids == plain(request)
    totals = engine.totals
    if arm != "lookup":
        assert totals.nodes_drafted > 0
        # Random drafters are hardly ever right, which the budget finds out.
        assert totals.nodes_verified < 0.8 * totals.nodes_drafted


def test_scores_are_log_probabilities_that_never_rise_along_a_path() -> None:
    for arm in ("eagle3", "dflash", "ddtree"):
        arms: dict[str, Any] = neural_drafters(
            eagle3=tiny_drafters.eagle3(), dflash=tiny_drafters.dflash(), eagle3_tokens=20
        )
        seen: list[DraftTree] = []
        draft = arms[arm].draft

        def watched(*args: Any, draft: Any = draft, seen: Any = seen) -> list[DraftTree]:
            trees: list[DraftTree] = draft(*args)
            seen.extend(trees)
            return trees

        arms[arm].draft = watched
        build(arm, arms, verify_budget="gain").generate([ask("a", text(1, 9), 12)])
        drafted = [tree for tree in seen if tree.num_drafted]
        assert drafted
        for tree in drafted:
            assert tree.scores is not None
            assert len(tree.scores) == len(tree)
            assert tree.scores[0] == 0.0
            for node in range(1, len(tree)):
                assert tree.scores[node] <= tree.scores[tree.parents[node]] + 1e-6
