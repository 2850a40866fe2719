"""Heads on top of a block drafter: a local one that corrects the chain, and one that predicts how
much of it is accepted. What they compute, what they learn, and that no output depends on them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import draft_reference as reference
import drafting
import pytest
import tiny
import tiny_drafters
import torch
from small_engines import ask, build, plain, text
from test_budget import costs
from test_training_objectives import cycle_text, seeded
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
from whiflash_agents.engine.errors import SettingsError
from whiflash_agents.engine.training.dflash import BlockTraining
from whiflash_agents.engine.training.feature_source import ComputedFeatures
from whiflash_agents.engine.training.length_head import LengthHeadObjective, new_length_head
from whiflash_agents.engine.training.local_head import (
    LocalHeadObjective,
    log_frequencies,
    new_local_head,
)
from whiflash_agents.engine.training.loop import TrainingLoop
from whiflash_agents.engine.training.schedule import TrainSettings
from whiflash_agents.engine.training.texts import TrainingText


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


# Learning -----------------------------------------------------------------------------------------


def run_loop(objective: Any, folder: Path, **changes: Any) -> Any:
    options: dict[str, Any] = {"epochs": 10, "peak_learning_rate": 1e-2, "autocast": "float32"}
    settings = TrainSettings(**(options | changes))
    loop = TrainingLoop(objective, [cycle_text(n) for n in range(24)], settings, folder)
    return loop.run()


def fresh_local_head(**changes: Any) -> LocalHead:
    texts = [cycle_text(n) for n in range(24)]
    fields: dict[str, Any] = {"state_size": 24, "rank": 16, "weight": 1.0, "unigram_weight": 1.0}
    config = LocalHeadConfig(32, tiny.VOCAB, 5, **(fields | changes))
    return new_local_head(config, tiny_drafters.markov_target(), texts)


def test_frequencies_are_those_of_the_responses() -> None:
    texts = [TrainingText("a", (1, 2, 2, 3, 4), ((1, 3), (4, 5)))]
    wanted = torch.tensor([1.0, 1.0, 3.0, 1.0, 2.0, 1.0]) / 9
    assert torch.allclose(log_frequencies(texts, 6).exp(), wanted)
    with pytest.raises(SettingsError, match="token 4 is outside the target's vocabulary of 4"):
        log_frequencies(texts, 4)


@pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
def test_a_local_head_learns_what_follows_what_and_repairs_a_block(
    tmp_path: Path, autocast: Any
) -> None:
    head, target = fresh_local_head(), tiny_drafters.markov_target()
    objective = LocalHeadObjective(head, target, anchors=16)
    before = objective.loss(cycle_text(1), seeded())
    trained = run_loop(objective, tmp_path, autocast=autocast)
    assert "accuracy@1" not in trained.figures
    assert all(trained.figures[f"accuracy@{k}"] > 0.95 for k in range(2, 6))
    assert trained.loss < 0.2 * before.total.item() / before.weight
    # A block that knows which tokens are likely, and not in which order: only its first is right.
    logits = torch.full((5, tiny.VOCAB), -4.0)
    logits[:, list(tiny_drafters.USED)] = 2.0
    logits[0, tiny_drafters.FOLLOWS[5]] = 9.0
    said = chains(head, logits, [5], target=target)[0]
    wanted = [5]
    for _ in range(5):
        wanted.append(tiny_drafters.FOLLOWS[wanted[-1]])
    assert said == wanted[1:]


def test_the_loss_of_a_local_head_is_cross_entropy_behind_the_first_token() -> None:
    head = fresh_local_head()
    objective = LocalHeadObjective(head, tiny_drafters.markov_target(), anchors=64)
    a_text = TrainingText("a", (3, 4, 5, 3, 4, 5, 3), ((3, 7),))
    loss = objective.loss(a_text, seeded())
    table, total, count = tiny_drafters.markov_target().embedding, 0.0, 0
    for anchor in (3, 4, 5):
        for at in range(anchor + 2, 7):
            states = head(table[torch.tensor([a_text.token_ids[anchor:at]])])
            chances = head.logits(head.project(states[:, -1])).log_softmax(-1)
            total -= chances[0, a_text.token_ids[at]].item()
            count += 1
    assert (loss.weight, loss.total.item()) == (count, pytest.approx(total, rel=1e-4))
    short = objective.loss(TrainingText("b", (3, 4, 5), ((1, 3),)), seeded())
    assert (short.weight, short.total.item()) == (0.0, 0.0)
    short.total.backward()


def half_trained() -> Any:
    """A drafter that is right behind some tokens and wrong behind others."""
    return tiny_drafters.agreeing_dflash()


def mixed_text(number: int) -> TrainingText:
    """Cycles that the drafter knows, broken off by tokens that nobody could foresee."""
    generator = seeded(number)
    said = list(cycle_text(number).token_ids[:24])
    noise = torch.randint(20, tiny.VOCAB - 1, (24,), generator=generator).tolist()
    return TrainingText(f"mixed-{number}", tuple(said + noise), ((4, 48),))


def length_objective(model: Any, anchors: int = 24) -> LengthHeadObjective:
    target = tiny_drafters.markov_target()
    source = ComputedFeatures(target, model.config.feature_layers)
    head = new_length_head(model, target, bottleneck=16)
    return LengthHeadObjective(head, model, target, source, anchors=anchors)


@pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
def test_a_length_head_learns_where_a_drafter_is_right(tmp_path: Path, autocast: Any) -> None:
    model = half_trained()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objective = length_objective(model)
    first = objective.loss(mixed_text(0), seeded()).figures
    settings = TrainSettings(20, 1, peak_learning_rate=1e-2, autocast=autocast)
    texts = [mixed_text(number) for number in range(16)]
    trained = TrainingLoop(objective, texts, settings, tmp_path).run()
    error, count = first["length_error"]
    assert trained.figures["length_error"] < 0.5 * error / count
    assert trained.figures["length_error"] < 0.13
    assert 1.5 < trained.figures["acceptance_length"] < 5
    assert trained.figures["verification_saved"] > 0.2
    assert trained.figures["tokens_lost"] < 0.1
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("local", [False, True])
def test_the_label_of_a_block_is_what_the_drafter_has_right(local: bool) -> None:
    model = tiny_drafters.dflash()
    model.local_head = local_head() if local else None
    objective = length_objective(model, anchors=64)
    a_text = mixed_text(3)
    loss = objective.loss(a_text, seeded())
    net = tiny_drafters.markov_net()
    features = reference.features(net, a_text.token_ids, model.config.feature_layers)
    tokens = torch.tensor(a_text.token_ids)
    blocks = BlockTraining(model, tiny_drafters.markov_target(), anchors=64, gamma=None)
    total, lengths = 0.0, []
    for anchor in range(4, 47):
        at = torch.tensor([anchor])
        slots = model.norm(blocks.slots(features, tokens, at))
        logits = blocks.logits(slots[0, 1:])
        said = logits.argmax(-1).tolist()
        if local:
            rows = torch.arange(5)
            coupling = Coupling(torch.zeros(5), rows, sampled=False)
            table = tiny_drafters.markov_target().embedding
            said = draft_chains(
                model.local_head, table, tokens[at], logits, [5], rows, coupling, lambda ids: ids
            )[0]
        accepted = 0
        while accepted < 5 and anchor + accepted + 1 < 48:
            if said[accepted] != a_text.token_ids[anchor + accepted + 1]:
                break
            accepted += 1
        share = torch.tensor((accepted + 1) / 6)
        logit = objective.head(slots)[0]
        total -= (share * logit.sigmoid().log() + (1 - share) * (1 - logit.sigmoid()).log()).item()
        lengths.append(accepted + 1)
    assert loss.weight == len(lengths)
    assert loss.total.item() == pytest.approx(total, rel=1e-4)
    assert loss.figures["acceptance_length"] == (sum(lengths), len(lengths))


def test_training_of_heads_that_is_stopped_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    def objectives() -> list[Any]:
        local = LocalHeadObjective(fresh_local_head(), tiny_drafters.markov_target(), anchors=8)
        return [local, length_objective(half_trained(), anchors=8)]

    settings = TrainSettings(epochs=1, autocast="float32")
    texts = [cycle_text(number) for number in range(16)]
    for at, (whole, parts) in enumerate(zip(objectives(), objectives(), strict=True)):
        TrainingLoop(whole, texts, settings, tmp_path / f"{at}-whole").run()
        folder = tmp_path / f"{at}-parts"
        loops: list[TrainingLoop] = []
        loop = TrainingLoop(
            parts, texts, settings, folder, on_step=lambda _, loops=loops: loops[0].stop()
        )
        loops.append(loop)
        assert not loop.run().finished
        again = objectives()[at]
        assert TrainingLoop(again, texts, settings, folder).run().finished
        for name, tensor in whole.network.state_dict().items():
            assert torch.equal(tensor, again.network.state_dict()[name]), name


def test_heads_that_cannot_be_are_refused() -> None:
    for wrong in (
        {"state_size": 0},
        {"rank": 0},
        {"weight": -0.1},
        {"unigram_weight": math.nan},
    ):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            fresh_local_head(**wrong)
    with pytest.raises(SettingsError, match="propose 1 token each"):
        new_local_head(LocalHeadConfig(32, tiny.VOCAB, 1), tiny_drafters.markov_target(), [])
    with pytest.raises(SettingsError, match="bottleneck=0"):
        new_length_head(half_trained(), tiny_drafters.markov_target(), bottleneck=0)
    with pytest.raises(SettingsError, match="anchors=0"):
        LocalHeadObjective(fresh_local_head(), tiny_drafters.markov_target(), anchors=0)
    with pytest.raises(SettingsError, match="anchors=0"):
        length_objective(half_trained(), anchors=0)
