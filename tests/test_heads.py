"""Heads on top of a block drafter: a local one that corrects the chain, and one that predicts how
much of it is accepted. What they compute, what they learn, and that no output depends on them."""

from __future__ import annotations

import math
from typing import Any

import drafting
import pytest
import tiny
import tiny_drafters
import torch
from small_engines import ask, build, plain, text
from test_budget import costs
from test_training_objectives import seeded
from torch import Tensor

from whiflash_agents.engine.draft_tree import DraftTree
from whiflash_agents.engine.drafters.candidates import Coupling, rank
from whiflash_agents.engine.drafters.length_head import (
    LengthHead,
    adjusted,
    predicted,
    share_of,
    worth_verifying,
)
from whiflash_agents.engine.drafters.local_chain import draft_chains
from whiflash_agents.engine.drafters.local_head import LocalHead, LocalHeadConfig
from whiflash_agents.engine.drafters.registry import neural_drafters


def local_head(seed: int = 0, **changes: Any) -> LocalHead:
    """Random weights that make a difference."""
    fields: dict[str, Any] = {"state_size": 12, "rank": 6, "weight": 1.5, "unigram_weight": 0.5}
    head = LocalHead(LocalHeadConfig(32, tiny.VOCAB, 5, **(fields | changes)))
    tiny_drafters.randomise(head, seed)
    with torch.no_grad():
        head.vocabulary.weight.mul_(8)
        head.unigram.copy_(torch.randn(tiny.VOCAB, generator=seeded(seed)).log_softmax(-1))
    return head


def length_head(seed: int = 0) -> LengthHead:
    head = LengthHead(32, 8)
    tiny_drafters.randomise(head, seed)
    return head


def with_heads(*, local: bool = True, length: bool = True, **changes: Any) -> Any:
    model = tiny_drafters.dflash(**changes)
    model.local_head = local_head() if local else None
    model.length_head = length_head() if length else None
    return model


# A local head -------------------------------------------------------------------------------------


def test_its_states_are_those_of_a_gated_recurrent_unit() -> None:
    head = local_head()
    unit = torch.nn.GRU(32, 12, batch_first=True)
    with torch.no_grad():
        unit.weight_ih_l0.copy_(head.input.weight)
        unit.weight_hh_l0.copy_(head.recurrent.weight)
        unit.bias_ih_l0.copy_(head.input.bias)
        unit.bias_hh_l0.copy_(head.recurrent.bias)
    embedded = torch.randn(3, 5, 32, generator=seeded())
    normed = embedded / embedded.pow(2).mean(-1, keepdim=True).sqrt()
    wanted = unit(normed)[0]
    assert torch.allclose(head(embedded), wanted, atol=1e-5)
    state = head.begin(3)
    for at in range(5):
        state = head.advance(embedded[:, at], state)
        assert torch.allclose(state, wanted[:, at], atol=1e-5)


def test_the_correction_is_weighted_logits_less_weighted_frequencies() -> None:
    head = local_head()
    state, tokens = torch.randn(4, 12, generator=seeded()), torch.randint(0, tiny.VOCAB, (4, 7))
    logits = head.logits(head.project(state)).gather(1, tokens)
    wanted = 1.5 * logits - 0.5 * head.unigram[tokens]
    assert torch.allclose(head.correction(state, tokens), wanted, atol=1e-4)


def block_logits(depths: list[int], seed: int = 1) -> Tensor:
    return 3 * torch.randn(sum(depths), tiny.VOCAB, generator=seeded(seed))


def chains(
    head: LocalHead,
    logits: Tensor,
    depths: list[int],
    temperature: float = 0.0,
    target: Any = None,
) -> Any:
    rows = torch.arange(len(logits))
    coupling = Coupling(
        torch.full((len(logits),), temperature), torch.full_like(rows, 9), temperature > 0
    )
    table = (target or tiny.target()).embedding
    bonus = torch.tensor([5 + i for i in range(len(depths))])
    return draft_chains(head, table, bonus, logits, depths, rows, coupling, lambda ids: ids)


def test_a_chain_is_the_best_of_corrected_logits_token_by_token() -> None:
    head, depths = local_head(), [5, 1, 3]
    logits, table = block_logits(depths), tiny.target().embedding
    tokens, scores = chains(head, logits, depths)
    at = 0
    for i, depth in enumerate(depths):
        said = [5 + i]
        for slot in range(depth):
            row = logits[at + slot]
            if slot:  # the first token stays the block's own
                state = head(table[torch.tensor([said])])[:, -1]
                row = row + head.correction(state, torch.arange(tiny.VOCAB)[None])[0]
            top = logits[at + slot].topk(64).indices
            best = int(top[row[top].argmax()])
            assert tokens[at + slot] == best
            share = logits[at + slot].softmax(-1)[top].sum()
            chance = row[top].softmax(-1).max() * share
            assert math.exp(scores[at + slot]) == pytest.approx(chance.item(), rel=1e-4)
            said.append(best)
        at += depth
    plain_tokens = logits.argmax(-1).tolist()
    assert tokens[0] == plain_tokens[0]
    assert tokens != plain_tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_head_of_no_weight_changes_nothing(temperature: float) -> None:
    head, depths = local_head(weight=0.0, unigram_weight=0.0), [5, 2]
    logits = block_logits(depths)
    tokens, scores = chains(head, logits, depths, temperature)
    rows = torch.arange(len(logits))
    coupling = Coupling(
        torch.full((len(logits),), temperature), torch.full_like(rows, 9), temperature > 0
    )
    wanted, best = rank(logits, 1, rows, coupling, lambda ids: ids)
    assert tokens == best[:, 0].tolist()
    assert scores == pytest.approx(wanted[:, 0].tolist(), abs=1e-4)


def test_weights_in_bfloat16_draft_nearly_the_same() -> None:
    head, depths = local_head(), [5, 4]
    logits = block_logits(depths)
    exact = chains(head, logits, depths)[0]
    table = tiny.target().embedding.bfloat16()
    rows = torch.arange(9)
    rough, scores = draft_chains(
        head.bfloat16(),
        table,
        torch.tensor([5, 6]),
        logits.bfloat16(),
        depths,
        rows,
        Coupling(torch.zeros(9), rows, sampled=False),
        lambda ids: ids,
        scored=False,
    )
    assert scores == []
    assert sum(a == b for a, b in zip(exact, rough, strict=True)) >= 7


def test_a_chain_depends_on_its_own_sequence_alone() -> None:
    head, logits = local_head(), block_logits([5, 3])
    both, _ = chains(head, logits, [5, 3])
    assert both[:5] == chains(head, logits[:5], [5])[0]


# A length head ------------------------------------------------------------------------------------


def test_a_length_is_the_share_of_the_block_without_its_bonus_token() -> None:
    for accepted in range(6):
        share = share_of(torch.tensor([float(accepted)]), 5)
        assert predicted(torch.logit(share), 5).item() == pytest.approx(accepted, abs=1e-4)
    assert predicted(torch.tensor([-30.0]), 5).item() == 0.0
    assert [worth_verifying(x) for x in (0.0, 0.3, 2.0, 4.9)] == [1, 2, 3, 6]


def test_what_the_head_computes() -> None:
    head, slots = length_head(), torch.randn(3, 6, 32, generator=seeded())
    state = dict(head.named_parameters())
    pooled = torch.cat((slots.mean(1), slots[:, 5]), -1)

    def silu(x: Tensor) -> Tensor:
        return x * x.sigmoid()

    hidden = silu(pooled @ state["down.weight"].T + state["down.bias"])
    hidden = hidden + silu(hidden @ state["res.0.weight"].T + state["res.0.bias"])
    wanted = hidden @ state["out.weight"].T + state["out.bias"]
    assert torch.allclose(head(slots), wanted[:, 0], atol=1e-5)


def test_scores_are_adjusted_to_the_length_that_is_predicted() -> None:
    scores = [depth * math.log(0.8) for depth in range(1, 8)]
    for wanted in (0.5, 2.0, 5.0):
        found = adjusted(scores, wanted)
        assert sum(map(math.exp, found)) == pytest.approx(wanted, abs=1e-3)
        assert found == sorted(found, reverse=True)
        assert max(found) < 0.0
    # More than the chain has, or nothing: as far as it goes, and no further.
    assert sum(map(math.exp, adjusted(scores, 9.0))) > 6.5
    assert sum(map(math.exp, adjusted(scores, 0.0))) < 0.1
    assert adjusted([], 3.0) == []


# In an engine -------------------------------------------------------------------------------------


def drafts_of(model: Any, **options: Any) -> tuple[list[DraftTree], Any]:
    arms = neural_drafters(dflash=model)
    seen: list[DraftTree] = []
    draft = arms["dflash"].draft

    def watched(*args: Any) -> list[DraftTree]:
        trees = draft(*args)
        seen.extend(trees)
        return trees

    arms["dflash"].draft = watched  # type: ignore[method-assign]
    requests = [
        ask(f"{i}", text(i, 12 + i), 20, temperature=0.9 * (i % 2), seed=i) for i in range(4)
    ]
    engine = build("dflash", arms, **options)
    for request, result in zip(requests, engine.generate(requests), strict=True):
        assert result.token_ids == plain(request)
    return seen, engine


@pytest.mark.parametrize("budget", ["all", "gain"])
@pytest.mark.parametrize(
    "heads", [{"local": True, "length": False}, {"local": False, "length": True}, {}], ids=str
)
@pytest.mark.parametrize(
    "changes", [{}, {"draft_vocab_size": 40, "sample_from_anchor": True}], ids=str
)
def test_output_does_not_depend_on_the_heads(budget: str, heads: Any, changes: Any) -> None:
    if changes:  # a block that drafts in every slot drafts one more
        changes = {**changes, "block_size": 5}
    options: dict[str, Any] = {"verify_budget": budget, "costs": costs(2e-3)}
    model = with_heads(**heads, **changes)
    if model.head is not None:
        model.head.d2t = torch.arange(40)  # every second token
    trees, _ = drafts_of(model, **options)
    drafted = [tree for tree in trees if tree.num_drafted]
    assert drafted
    for tree in drafted:
        if budget == "gain":
            assert tree.scores is not None
            assert all(a >= b - 1e-6 for a, b in zip(tree.scores, tree.scores[1:], strict=False))
        else:
            assert tree.scores is None


def test_a_local_head_changes_what_is_drafted_behind_the_first_token() -> None:
    model = with_heads(length=False)
    one, _ = drafts_of(tiny_drafters.dflash(), max_running=1)
    other, _ = drafts_of(model, max_running=1)
    assert [t.tokens for t in one] != [t.tokens for t in other]
    firsts = {t.tokens[0]: t.tokens[1] for t in one[:1] if t.num_drafted}
    assert all(firsts.get(t.tokens[0], t.tokens[1]) == t.tokens[1] for t in other[:1])


@pytest.mark.parametrize(("bias", "depth"), [(-30.0, 1), (30.0, 5), (0.0, 3)])
def test_a_length_head_cuts_what_is_verified(bias: float, depth: int) -> None:
    model = with_heads(local=False)
    with torch.no_grad():
        model.length_head.out.weight.zero_()
        model.length_head.out.bias.fill_(bias)
    trees, _ = drafts_of(model)
    assert max(tree.num_drafted for tree in trees) == depth


def test_with_a_budget_the_predicted_length_decides_how_much_is_verified() -> None:
    verified = []
    for bias in (-2.0, 3.0):
        model = with_heads(local=False)
        with torch.no_grad():
            model.length_head.out.weight.zero_()
            model.length_head.out.bias.fill_(bias)
        trees, engine = drafts_of(model, verify_budget="gain", costs=costs(3e-3))
        assert max(tree.num_drafted for tree in trees) == 5  # the block is drafted as ever
        verified.append(engine.totals.nodes_verified)
    assert verified[0] < verified[1]


def test_ddtree_drafts_from_the_block_as_it_is() -> None:
    found = []
    for model in (tiny_drafters.dflash(), with_heads()):
        run = drafting.Run("ddtree", neural_drafters(dflash=model.double()))
        run.finish(ask("a", text(3, 15), 16))
        found.append(run.by_text())
    assert found[0] == found[1]
