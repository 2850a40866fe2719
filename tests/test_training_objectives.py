"""What drafters are trained on is what they compute when they draft: logits of every step and slot,
losses, and learning."""

from __future__ import annotations

import math
from typing import Any

import draft_reference as reference
import drafting
import pytest
import tiny
import tiny_drafters
import torch
from torch.nn.functional import cross_entropy

from whiflash_agents.engine.drafters.dflash_model import DFlashModel
from whiflash_agents.engine.drafters.eagle3_model import Eagle3Model
from whiflash_agents.engine.errors import ContextLengthError, SettingsError
from whiflash_agents.engine.target import Target
from whiflash_agents.engine.training.dflash import (
    Anchors,
    BlockTraining,
    DFlashObjective,
    default_gamma,
    draw_anchors,
)
from whiflash_agents.engine.training.eagle3 import Chains, Eagle3Objective
from whiflash_agents.engine.training.feature_source import ComputedFeatures
from whiflash_agents.engine.training.head_loss import head_loss
from whiflash_agents.engine.training.on_policy import OnPolicyDFlashObjective
from whiflash_agents.engine.training.texts import TrainingText


def tokens(count: int = 40, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny.VOCAB - 1, (count,), generator=generator).tolist()


def a_text(count: int = 40, responses: Any = ((12, 22), (30, 40)), seed: int = 0) -> TrainingText:
    return TrainingText("text", tuple(tokens(count, seed)), responses)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def eagle3_objective(network: Any, **options: Any) -> Eagle3Objective:
    target = drafting.target()
    source = ComputedFeatures(target, network.config.feature_layers)
    return Eagle3Objective(network, target, source, **options)


def dflash_objective(network: Any, **options: Any) -> DFlashObjective:
    target = drafting.target()
    source = ComputedFeatures(target, network.config.feature_layers)
    return DFlashObjective(network, target, source, **options)


def features_of(network: Any, text: TrainingText) -> torch.Tensor:
    return reference.features(drafting.net(), text.token_ids, network.config.feature_layers)


# EAGLE-3 ------------------------------------------------------------------------------------------

EAGLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm before residual": {"norm_before_residual": True},
    "norm output": {"norm_output": True},
    "fc norm": {"fc_norm": True},
    "norm before fc": {"norm_before_fc": True},
    "no query norm": {"layer": tiny_drafters.layers(qk_norm=False, attention_bias=True)},
    "window": {"layer": tiny_drafters.layers(sliding=(True,), sliding_window=6)},
    "whole vocabulary": {"draft_vocab": tiny.VOCAB},
    "own embedding": {"own_embedding": True},
}


@pytest.mark.parametrize("changes", EAGLES.values(), ids=EAGLES)
def test_every_step_of_a_chain_has_the_logits_that_drafting_it_has(changes: Any) -> None:
    network = tiny_drafters.eagle3(**changes).double()
    text = a_text()
    objective = eagle3_objective(network, steps=4)
    chains = objective.chains(text, seeded())
    with torch.no_grad():
        outputs = objective.unroll(features_of(network, text), torch.tensor(text.token_ids), chains)
        compared = 0
        for step, hidden in enumerate(outputs):
            for start, got in zip(chains.starts.tolist(), network.logits(hidden), strict=False):
                draft = reference.Eagle3Reference(
                    drafting.net(), network, text.token_ids[: start + 2]
                )
                path = text.token_ids[start + 2 : start + 2 + step]
                wanted = network.logits(draft.step(tuple(path))[2][None])[0]
                assert torch.allclose(got, wanted, atol=1e-9)
                compared += 1
    assert compared == 2 * (9 + 8 + 7 + 6)


def test_chains_begin_at_every_bonus_token_and_end_with_their_response() -> None:
    chains = eagle3_objective(drafting.eagle3_model(), steps=3).chains(
        a_text(responses=((12, 16), (30, 31), (35, 40))), seeded()
    )
    # A chain at row s has the bonus token s + 1; its last label is the last token of the response.
    assert dict(zip(chains.starts.tolist(), chains.steps.tolist(), strict=True)) == {
        11: 3,
        12: 2,
        13: 1,
        34: 3,
        35: 3,
        36: 2,
        37: 1,
    }
    assert chains.steps.tolist() == sorted(chains.steps.tolist(), reverse=True)


def test_of_too_many_chains_some_are_drawn_anew_each_time() -> None:
    objective = eagle3_objective(drafting.eagle3_model(), steps=3, max_rows=5)
    generator, text = seeded(), a_text(responses=((12, 40),))
    first, second = (objective.chains(text, generator) for _ in range(2))
    assert len(first.starts) == len(second.starts) == 5
    assert set(first.starts.tolist()) != set(second.starts.tolist())
    again = objective.chains(text, seeded())
    assert torch.equal(first.starts, again.starts)


@pytest.mark.parametrize("changes", [{}, {"draft_vocab": tiny.VOCAB}, {"norm_output": True}])
def test_the_loss_of_eagle3_is_decayed_soft_cross_entropy_over_the_draft_vocabulary(
    changes: Any,
) -> None:
    network = tiny_drafters.eagle3(**changes).double()
    text, steps, decay = a_text(), 3, 0.7
    objective = eagle3_objective(network, steps=steps, decay=decay)
    got = objective.loss(text, seeded())
    with torch.no_grad():
        truth = drafting.net()(torch.tensor([text.token_ids])).logits[0]
    known = network.head.target_ids(torch.arange(network.config.draft_vocab_size))
    total = weight = 0.0
    right, counts, lengths, inside = [0] * steps, [0] * steps, [], {}
    for start, end in text.responses:
        for bonus in range(start, end - 1):
            draft = reference.Eagle3Reference(drafting.net(), network, text.token_ids[: bonus + 1])
            length, going = 1, True
            for step in range(min(steps, end - 1 - bonus)):
                path = tuple(text.token_ids[bonus + 1 : bonus + 1 + step])
                logits = network.logits(draft.step(path)[2][None])[0].detach()
                said = truth[bonus + step]
                best = int(said.argmax())
                hit = int(known[logits.argmax()]) == best
                going &= hit
                length += going
                right[step] += hit
                counts[step] += 1
                inside[bonus + step] = best in known
                if best in known:
                    loss = -(said[known].softmax(-1) * logits.log_softmax(-1)).sum()
                    total += decay**step * float(loss)
                    weight += decay**step
            lengths.append(length)
    assert got.total.item() == pytest.approx(total)
    assert got.weight == pytest.approx(weight)
    assert got.figures["coverage"] == (sum(inside.values()), len(inside))
    assert got.figures["acceptance_length"] == (sum(lengths), len(lengths))
    for step in range(steps):
        assert got.figures[f"accuracy@{step + 1}"] == (right[step], counts[step])
    if network.config.draft_vocab_size < tiny.VOCAB:
        assert not all(inside.values())


def test_gradients_of_eagle3_are_those_of_the_loss_written_out() -> None:
    network = tiny_drafters.eagle3().double().requires_grad_(True)
    text = a_text()
    objective = eagle3_objective(network, steps=3)
    chains = objective.chains(text, seeded())
    hidden = objective.unroll(features_of(network, text), torch.tensor(text.token_ids), chains)
    with torch.no_grad():
        truth = drafting.net()(torch.tensor([text.token_ids])).logits[0]
    known = network.head.target_ids(torch.arange(network.config.draft_vocab_size))
    total = torch.zeros((), dtype=torch.float64)
    for step, rows in enumerate(hidden):
        said = truth[chains.starts[: len(rows)] + step + 1]
        counted = torch.isin(said.argmax(-1), known)
        losses = cross_entropy(network.logits(rows), said[:, known].softmax(-1), reduction="none")
        total = total + 0.8**step * losses[counted].sum()
    total.backward()
    wanted = {name: p.grad.clone() for name, p in network.named_parameters()}
    network.zero_grad()
    (objective.loss(text, seeded()).total * 0.5).backward()
    for name, parameter in network.named_parameters():
        assert torch.allclose(parameter.grad, 0.5 * wanted[name]), name
    assert drafting.target().embedding.grad is None


def test_only_text_that_a_chain_can_see_matters() -> None:
    network = tiny_drafters.eagle3().double()
    objective = eagle3_objective(network, steps=3)
    text = a_text(responses=((12, 22),))
    other = TrainingText("other", (*text.token_ids[:22], *tokens(18, seed=9)), text.responses)
    first, second = (objective.loss(t, seeded()).total for t in (text, other))
    assert first.item() == pytest.approx(second.item(), abs=1e-9)


# DFlash -------------------------------------------------------------------------------------------

_SLIDING = tiny_drafters.layers(num_layers=2, sliding=(True, False), sliding_window=5)
BLOCKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sample from anchor": {"sample_from_anchor": True},
    "own head": {"draft_vocab_size": 30},
    "own embedding": {"own_embedding": True},
    "scales": {"embedding_scale": 1.7, "output_multiplier": 0.6, "logit_softcap": 4.0},
    "window, causal": {"layers": _SLIDING},
    "window, not causal": {"layers": _SLIDING, "sliding_causal": False},
    "window from bonus": {"layers": _SLIDING, "window_from": "bonus", "sliding_causal": False},
    "window from bonus, causal": {"layers": _SLIDING, "window_from": "bonus"},
    "no query norm": {"layers": tiny_drafters.layers(num_layers=2, qk_norm=False)},
}


def block_network(**changes: Any) -> Any:
    network = tiny_drafters.dflash(**changes).double()
    if network.head is not None:
        chosen = torch.arange(0, 90, 3)
        network.head.d2t = chosen - torch.arange(30)
    return network


@pytest.mark.parametrize("changes", BLOCKS.values(), ids=BLOCKS)
def test_every_block_has_the_logits_that_drafting_it_has(changes: Any) -> None:
    network = block_network(**changes)
    text = a_text()
    blocks = BlockTraining(network, drafting.target(), anchors=8, gamma=None)
    anchors = torch.tensor([1, 2, 7, 13, 20, 33, 39])
    with torch.no_grad():
        hidden = blocks.run(features_of(network, text), torch.tensor(text.token_ids), anchors)
        for anchor, got in zip(anchors.tolist(), blocks.logits(hidden), strict=True):
            wanted = reference.dflash_logits(drafting.net(), network, text.token_ids[: anchor + 1])
            assert torch.allclose(got, wanted, atol=1e-9)


def test_anchors_are_drawn_among_responses_and_anew_each_time() -> None:
    generator, text = seeded(), a_text()
    seen = [draw_anchors(text, 6, generator) for _ in range(40)]
    for anchors in seen:
        positions = anchors.positions.tolist()
        assert len(positions) == 6
        assert positions == sorted(set(positions))
    assert len({tuple(a.positions.tolist()) for a in seen}) > 30
    # All tokens of a response but its last, which nothing follows.
    assert {p for a in seen for p in a.positions.tolist()} == {*range(12, 21), *range(30, 39)}
    every = draw_anchors(text, 99, generator)
    assert every.ends.tolist() == [22] * 9 + [40] * 9


def test_slots_behind_the_response_do_not_count() -> None:
    anchors = Anchors(torch.tensor([12, 19, 20]), torch.tensor([22, 22, 22]))
    assert anchors.inside(3).tolist() == [
        [True, True, True],
        [True, True, False],
        [True, False, False],
    ]


@pytest.mark.parametrize("labels", ["text", "target"])
@pytest.mark.parametrize("changes", [{}, BLOCKS["own head"], BLOCKS["scales"]])
def test_the_loss_of_dflash_is_cross_entropy_weighted_by_position(
    changes: Any, labels: Any
) -> None:
    network = block_network(**changes).requires_grad_(True)
    text, gamma = a_text(), 2.0
    objective = dflash_objective(network, anchors=7, gamma=gamma, labels=labels)
    got = objective.loss(text, seeded(3))
    got.total.backward()
    found = {name: p.grad.clone() for name, p in network.named_parameters()}
    network.zero_grad()

    anchors = draw_anchors(text, 7, seeded(3))
    with torch.no_grad():
        truth = drafting.net()(torch.tensor([text.token_ids])).logits[0]
    blocks = objective.blocks
    hidden = blocks.run(features_of(network, text), torch.tensor(text.token_ids), anchors.positions)
    total = torch.zeros((), dtype=torch.float64)
    weight, right, counts, lengths = 0.0, [0] * 5, [0] * 5, []
    for block, (anchor, end) in enumerate(
        zip(anchors.positions.tolist(), anchors.ends.tolist(), strict=True)
    ):
        logits, length, going = blocks.logits(hidden[block]), 1, True
        for depth in range(5):
            if anchor + depth + 1 >= end:
                continue
            label = text.token_ids[anchor + depth + 1]
            if labels == "target":
                label = int(truth[anchor + depth].argmax())
            if network.head is not None:
                label = {3 * i: i for i in range(30)}.get(label, -1)
            hit = int(logits[depth].argmax()) == label
            going &= hit
            length += going
            right[depth] += hit
            counts[depth] += 1
            if label >= 0:
                weight += math.exp(-depth / gamma)
                loss = cross_entropy(logits[depth], torch.tensor(label))
                total = total + math.exp(-depth / gamma) * loss
        lengths.append(length)
    assert got.total.item() == pytest.approx(total.item(), rel=1e-6)
    assert got.weight == pytest.approx(weight)
    for depth in range(5):
        assert got.figures[f"accuracy@{depth + 1}"] == (right[depth], counts[depth])
    assert got.figures["acceptance_length"] == (sum(lengths), len(lengths))
    total.backward()
    for name, parameter in network.named_parameters():
        assert torch.allclose(parameter.grad, found[name], rtol=1e-5, atol=1e-5), name
    assert drafting.target().model.get_output_embeddings().weight.grad is None


def test_gamma_follows_the_block_as_in_the_paper() -> None:
    assert [default_gamma(size) for size in (8, 10, 16)] == [4.0, 5.0, 7.0]


# Both ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("responses", [(), ((12, 13),)])
def test_a_text_with_nothing_to_draft_has_no_loss(responses: Any) -> None:
    text = a_text(responses=responses)
    for objective in (
        eagle3_objective(tiny_drafters.eagle3().double().requires_grad_(True)),
        dflash_objective(tiny_drafters.dflash().double().requires_grad_(True)),
    ):
        loss = objective.loss(text, seeded())
        loss.total.backward()
        assert loss.weight == 0.0
        assert loss.total.item() == 0.0


def test_bad_settings_are_refused() -> None:
    network = tiny_drafters.random_eagle3()
    for options in ({"steps": 0}, {"decay": 0.0}, {"decay": 1.5}, {"max_rows": 0}):
        with pytest.raises(SettingsError, match=next(iter(options))):
            eagle3_objective(network, **options)
    for wrong in ({"anchors": 0}, {"gamma": 0.0}, {"labels": "teacher"}):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            dflash_objective(tiny_drafters.random_dflash(), **wrong)


def test_a_head_s_loss_does_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(11, 8, requires_grad=True)
    head = torch.nn.Linear(8, 20, bias=False)
    labels = torch.arange(11)

    def loss_of(logits: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        inner = logits.clone().requires_grad_()
        with torch.enable_grad():
            loss = cross_entropy(inner, labels[rows], reduction="sum")
        return loss.detach(), torch.autograd.grad(loss, inner)[0]

    found = []
    for piece in (1 << 20, 60, 1):
        monkeypatch.setattr("whiflash_agents.engine.training.head_loss._PIECE", piece)
        total = head_loss(head, hidden, loss_of, width=20, parameters=(head.weight,))
        found.append((total, *torch.autograd.grad(total, (hidden, head.weight))))
    plain = cross_entropy(head(hidden), labels, reduction="sum")
    wanted = (plain, *torch.autograd.grad(plain, (hidden, head.weight)))
    for got in found:
        for a, b in zip(got, wanted, strict=True):
            assert torch.allclose(a, b, atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(head_loss(head, hidden, loss_of, width=20), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_runs_in_bfloat16_with_weights_and_gradients_in_float32(
    dtype: torch.dtype,
) -> None:
    target = Target(tiny.model("llama").to(dtype))
    eagle = tiny_drafters.eagle3().requires_grad_(True)
    block = tiny_drafters.dflash().requires_grad_(True)
    text = a_text()
    for objective in (
        Eagle3Objective(eagle, target, ComputedFeatures(target, (0, 1, 2)), steps=3),
        DFlashObjective(block, target, ComputedFeatures(target, (1, 2)), anchors=8),
    ):
        exact = objective.loss(text, seeded())
        with torch.autocast("cpu", torch.bfloat16):
            rough = objective.loss(text, seeded())
        rough.total.backward()
        assert rough.total.item() == pytest.approx(exact.total.item(), rel=0.03)
        for parameter in objective.network.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            assert parameter.grad.isfinite().all()


def cycle_text(number: int) -> TrainingText:
    """What the Markov target says, which runs in cycles."""
    said = [int(tiny_drafters.USED[number % len(tiny_drafters.USED)])]
    while len(said) < 40:
        said.append(tiny_drafters.FOLLOWS[said[-1]])
    return TrainingText(f"cycle-{number}", tuple(said), ((4, 40),))


def learn(objective: Any, steps: int) -> tuple[list[float], list[float]]:
    """Losses and acceptance lengths while training."""
    optimizer = torch.optim.Adam(objective.network.parameters(), lr=3e-3)
    generator, losses, lengths = seeded(), [], []
    for step in range(steps):
        loss = objective.loss(cycle_text(step * 5), generator)
        (loss.total / loss.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        total, count = loss.figures["acceptance_length"]
        losses.append(loss.total.item() / loss.weight)
        lengths.append(total / count)
    return losses, lengths


def calm(network: Any) -> Any:
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.mul_(1 / 3)
    return network.train().requires_grad_(True)


def test_eagle3_learns_what_a_deterministic_target_says() -> None:
    network: Eagle3Model = calm(tiny_drafters.eagle3(draft_vocab=tiny.VOCAB))
    target = tiny_drafters.markov_target()
    objective = Eagle3Objective(network, target, ComputedFeatures(target, (0, 1, 2)), steps=4)
    losses, lengths = learn(objective, 100)
    assert sum(lengths[:5]) / 5 < 1.5
    assert sum(lengths[-5:]) / 5 > 4.5
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


def test_dflash_learns_what_a_deterministic_target_says() -> None:
    network: DFlashModel = calm(tiny_drafters.dflash(block_size=5))
    target = tiny_drafters.markov_target()
    objective = DFlashObjective(network, target, ComputedFeatures(target, (1, 2)), anchors=16)
    losses, lengths = learn(objective, 150)
    assert sum(lengths[:5]) / 5 < 1.5
    assert sum(lengths[-5:]) / 5 > 4.5
    assert sum(losses[-5:]) < 0.3 * sum(losses[:5])


def test_a_chain_that_has_no_step_left_is_not_run() -> None:
    chains = Chains(torch.tensor([3, 9]), torch.tensor([3, 1]))
    assert [chains.going(step) for step in range(4)] == [2, 1, 1, 0]


# On-policy ----------------------------------------------------------------------------------------


def on_policy_objective(network: Any, architecture: str, **options: Any) -> OnPolicyDFlashObjective:
    return OnPolicyDFlashObjective(network, drafting.target(architecture), **options)


@pytest.mark.parametrize("changes", [{}, BLOCKS["own head"], BLOCKS["sample from anchor"]])
@pytest.mark.parametrize("architecture", ["llama", "mistral"])  # the latter with a window of 7
def test_the_teacher_says_what_it_would_say_behind_every_drafted_token(
    architecture: str, changes: Any
) -> None:
    network = block_network(**changes).requires_grad_(True)
    text, gamma, share = a_text(), 2.0, 0.3
    objective = on_policy_objective(network, architecture, anchors=6, gamma=gamma, divergence=share)
    got = objective.loss(text, seeded(3))
    got.total.backward()
    found = {name: p.grad.clone() for name, p in network.named_parameters()}
    network.zero_grad()

    anchors = draw_anchors(text, 6, seeded(3))
    net = drafting.net(architecture)
    features = reference.features(net, text.token_ids, network.config.feature_layers)
    blocks = objective.blocks
    hidden = blocks.run(features, torch.tensor(text.token_ids), anchors.positions)
    known = torch.arange(tiny.VOCAB)
    if network.head is not None:
        known = network.head.target_ids(torch.arange(30))
    total = torch.zeros((), dtype=torch.float64)
    weight, lengths = 0.0, []
    for block, (anchor, end) in enumerate(
        zip(anchors.positions.tolist(), anchors.ends.tolist(), strict=True)
    ):
        logits, length, going = blocks.logits(hidden[block]), 1, True
        drafted = known[logits.argmax(-1)].tolist()
        with torch.no_grad():
            ids = [*text.token_ids[: anchor + 1], *drafted]
            said = net(torch.tensor([ids])).logits[0, anchor:]
        for depth in range(min(len(drafted), end - 1 - anchor)):
            best = int(said[depth].argmax())
            going &= drafted[depth] == best
            length += going
            if best not in known:
                continue
            student, teacher = (x.log_softmax(-1) for x in (logits[depth], said[depth][known]))
            label = known.tolist().index(best)
            divergence = (student.exp() * (student - teacher)).sum()
            factor = math.exp(-depth / gamma)
            total = total + factor * (share * divergence - (1 - share) * student[label])
            weight += factor
        lengths.append(length)
    assert got.total.item() == pytest.approx(total.item(), rel=1e-6)
    assert got.weight == pytest.approx(weight)
    assert got.figures["acceptance_length"] == (sum(lengths), len(lengths))
    total.backward()
    for name, parameter in network.named_parameters():
        assert torch.allclose(parameter.grad, found[name], rtol=1e-5, atol=1e-5), name


def test_on_policy_training_improves_on_what_texts_taught() -> None:
    network: DFlashModel = calm(tiny_drafters.dflash(block_size=5))
    target = tiny_drafters.markov_target()
    texts = DFlashObjective(network, target, ComputedFeatures(target, (1, 2)), anchors=16)
    learn(texts, 100)
    losses, lengths = learn(OnPolicyDFlashObjective(network, target, anchors=16), 100)
    assert sum(lengths[-20:]) > sum(lengths[:20]) + 10
    assert sum(losses[-20:]) < 0.6 * sum(losses[:20])


def test_a_share_of_divergence_out_of_range_is_refused() -> None:
    with pytest.raises(SettingsError, match="divergence"):
        on_policy_objective(drafting.dflash_model(), "llama", divergence=1.5)


def test_a_block_beyond_the_context_of_the_teacher_is_refused() -> None:
    objective = on_policy_objective(tiny_drafters.dflash().double(), "llama", anchors=999)
    with pytest.raises(ContextLengthError, match="exceeds the context"):
        objective.loss(a_text(512, ((8, 512),)), seeded())
