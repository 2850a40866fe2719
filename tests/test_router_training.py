"""Routers learn what can be known, and the report says when nothing could be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import drafting
import pytest
import tiny_drafters
import torch
from small_engines import ask
from torch import nn

from whiflash_agents.engine import EngineSettings, WhiFlashEngine
from whiflash_agents.engine.drafters.lookup import LookupDrafter
from whiflash_agents.engine.errors import SettingsError
from whiflash_agents.engine.routing.acceptance import RecentAcceptance
from whiflash_agents.engine.routing.base import Router
from whiflash_agents.engine.routing.labels import RoundLabeller, RoundLabels
from whiflash_agents.engine.routing.neural import RouterHead
from whiflash_agents.engine.routing.neural_acceptance import AcceptanceHead
from whiflash_agents.engine.routing.oracle import Oracle, route_taken
from whiflash_agents.engine.sequence import SequenceState
from whiflash_agents.engine.telemetry import RoundRecord
from whiflash_agents.engine.training.fitting import (
    Examples,
    FitSettings,
    explained,
    fit,
    predict,
    split_rows,
)
from whiflash_agents.engine.training.router import train_acceptance, train_difference
from whiflash_agents.engine.training.walks import walk, walked_examples

HIDDEN = 64
ARMS = ("eagle3", "dflash")
SETTINGS = FitSettings(batch_size=64, epochs=50)


def row(salt: int, *, known: bool, rounds: int = 400) -> RoundLabels:
    """A row whose hidden states say which arm is good (`known`), or say nothing. Like real ones,
    the last rounds have few tokens left."""
    generator = torch.Generator().manual_seed(salt)
    hidden = torch.randn(rounds, HIDDEN, generator=generator)
    told = hidden if known else torch.randn(rounds, HIDDEN, generator=generator)
    good = 5.0 + 4.0 * torch.tanh(0.4 * told[:, :4].sum(1))
    lengths = torch.stack((good, 10.0 - good), 1).round().clamp(min=1).long()
    left = torch.arange(rounds, 0, -1)
    return RoundLabels(
        f"row {salt}",
        10,
        ARMS,
        torch.minimum(lengths, left[:, None]),
        torch.full((rounds, 2), 8),
        torch.zeros(rounds),
        torch.zeros(rounds),
        hidden,
    )


KNOWN = [row(salt, known=True) for salt in range(16)]
UNKNOWN = [row(salt, known=False) for salt in range(16)]


def test_the_published_head_learns_a_difference_that_the_hidden_state_tells() -> None:
    report = train_difference(RouterHead(HIDDEN), KNOWN, ARMS, SETTINGS)
    assert report.r2["difference"] is not None
    assert report.r2["difference"] > 0.9
    assert report.captured is not None
    assert report.captured > 0.8
    assert 0.0 <= report.regret < 0.4
    assert report.single < report.routed <= report.oracle
    assert set(report.by_arm) == set(ARMS)


def test_the_head_for_n_arms_learns_what_each_accepts() -> None:
    report = train_acceptance(AcceptanceHead(HIDDEN, ARMS), KNOWN, SETTINGS)
    assert set(report.r2) == set(ARMS)
    assert min(r or 0.0 for r in report.r2.values()) > 0.9
    assert (report.captured or 0.0) > 0.8


def test_the_head_for_n_arms_learns_from_recent_rounds_what_nothing_else_tells() -> None:
    rows = []
    for number, r in enumerate(UNKNOWN):
        good = torch.tensor([[1, 7], [7, 1]])[number % 2]  # one arm, in all of the row
        left = torch.arange(r.num_rounds, 0, -1)[:, None]
        rows.append(replace(r, acceptance=torch.minimum(good, left)))
    many = replace(SETTINGS, reported=0.4)  # rows of both kinds among them
    report = train_acceptance(AcceptanceHead(HIDDEN, ARMS), rows, many)
    blind = train_acceptance(AcceptanceHead(HIDDEN, ARMS), UNKNOWN, SETTINGS)
    assert min(r or 0.0 for r in report.r2.values()) > 0.5
    assert (report.captured or 0.0) > 0.8
    assert max(r or 0.0 for r in blind.r2.values()) < 0.05


class Watching(RecentAcceptance):
    """Keeps all that it predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[float]] = []

    def predict(self, sequences: Sequence[SequenceState], arms: Sequence[str]) -> list[list[float]]:
        lengths = super().predict(sequences, arms)
        self.found += lengths
        return lengths


class Alternating(Router):
    """One arm after another; asks a predictor before each round and lets it see the outcome."""

    name = "alternating"
    arms = ARMS
    signals = frozenset({"entropy", "hidden"})

    def __init__(self, predictor: RecentAcceptance) -> None:
        self.predictor = predictor
        self.turn = 0

    def route(self, sequences: Sequence[SequenceState]) -> list[str]:
        self.predictor.predict(sequences, ARMS)
        self.turn += 1
        return [ARMS[self.turn % 2]] * len(sequences)

    def observe(self, sequence: SequenceState, record: RoundRecord) -> None:
        self.predictor.observe(sequence, record)


def test_a_walk_shows_a_predictor_what_an_engine_shows_it() -> None:
    request = ask("a", (5, 6, 7, 8), 30, temperature=0.7, seed=4)
    in_engine, in_walk = Watching(), Watching()
    engine = WhiFlashEngine(
        drafting.target(),
        router=Alternating(in_engine),
        drafters=drafting.neural_drafters(),
        settings=EngineSettings(kv_tokens=1024),
    )
    result = engine.generate([request])[0]
    labeller = RoundLabeller(drafting.target(), drafting.neural_drafters())
    labels = labeller.label(request, result.token_ids)
    turn = 0

    def choose(at: int, sequence: SequenceState) -> int:
        nonlocal turn
        in_walk.predict([sequence], ARMS)
        turn += 1
        return turn % 2

    route = walk(labels, ARMS, in_walk, choose)
    assert route == route_taken(result.stats.rounds)
    assert len(in_walk.found) == len(route) > 10
    for mine, theirs in zip(in_walk.found, in_engine.found, strict=True):
        assert mine == pytest.approx(theirs)


def test_random_walks_meet_most_rounds_of_every_row() -> None:
    examples = walked_examples(KNOWN[:3], ARMS, walks=6, seed=0)
    again = walked_examples(KNOWN[:3], ARMS, walks=6, seed=0)
    for row_, example, same in zip(KNOWN, examples, again, strict=False):
        hidden, scalars = example.inputs
        assert len(hidden) == len(scalars) == len(example.targets)
        assert scalars.shape[1] == 2 + len(ARMS)
        assert len(hidden.unique(dim=0)) > 0.6 * row_.num_rounds
        where = int((row_.hidden == hidden[-1]).all(1).nonzero())
        assert example.targets[-1].tolist() == row_.acceptance[where].tolist()
        assert all(torch.equal(a, b) for a, b in zip(example.inputs, same.inputs, strict=True))


def test_where_the_hidden_state_tells_nothing_the_report_says_so() -> None:
    report = train_difference(RouterHead(HIDDEN), UNKNOWN, ARMS, SETTINGS)
    assert (report.r2["difference"] or 0.0) < 0.1
    assert (report.captured or 0.0) < 0.2
    assert report.fit.epochs < SETTINGS.epochs  # it stopped when nothing came of it


def test_training_is_the_same_every_time_and_leaves_the_generators_alone() -> None:
    nets = [RouterHead(HIDDEN), RouterHead(HIDDEN)]  # whatever they begin with
    assert not torch.equal(next(nets[0].parameters()), next(nets[1].parameters()))
    before = torch.get_rng_state()
    few = replace(SETTINGS, epochs=3)
    reports = [train_difference(net, KNOWN[:9], ARMS, few) for net in nets]
    assert reports[0] == reports[1]
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), before)
    other = train_difference(RouterHead(HIDDEN), KNOWN[:9], ARMS, replace(few, seed=1))
    assert other.fit.train != reports[0].fit.train


def test_the_network_ends_with_its_best_weights_ready_to_serve() -> None:
    net = RouterHead(HIDDEN)
    rows = [
        Examples((r.hidden,), torch.randn(400, 1, generator=torch.Generator().manual_seed(i)))
        for i, r in enumerate(KNOWN[:8])
    ]
    result = fit(net, rows, replace(SETTINGS, epochs=30))
    assert result.best_epoch < result.epochs == result.best_epoch + SETTINGS.patience
    held = [rows[i] for i in result.stopping]
    inputs = [torch.cat([example.inputs[0] for example in held])]
    targets = torch.cat([example.targets for example in held])
    loss = (predict(net, inputs) - targets).square().mean().item()
    assert loss == pytest.approx(result.stopping_loss)
    assert not net.training
    assert not any(p.requires_grad for p in net.parameters())


def test_the_learning_rate_peaks_where_it_is_said_to_and_ends_at_nothing() -> None:
    seen: list[float] = []
    step = torch.optim.AdamW.step

    class Watching(torch.optim.AdamW):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            seen.append(self.param_groups[0]["lr"])
            step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "AdamW", Watching)
        fit(
            RouterHead(HIDDEN),
            [Examples((r.hidden,), r.acceptance[:, :1].float()) for r in KNOWN[:10]],
            FitSettings(batch_size=100, epochs=5, warmup=0.2, patience=5),
        )
    assert max(seen) == 1e-3
    peak = seen.index(max(seen))
    assert seen[: peak + 1] == sorted(seen[: peak + 1])
    assert seen[peak:] == sorted(seen[peak:], reverse=True)
    assert seen[-1] < 2e-5


@pytest.mark.parametrize("count", [3, 4, 11, 64])
def test_rows_are_split_without_overlap(count: int) -> None:
    parts = split_rows(count, FitSettings())
    assert sorted(i for part in parts for i in part) == list(range(count))
    assert all(parts)
    assert len(parts[0]) >= max(len(parts[1]), len(parts[2]))
    assert parts == split_rows(count, FitSettings())


def test_explained_variance() -> None:
    targets = torch.tensor([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0]])
    predicted = torch.tensor([[1.0, 5.0], [2.0, 6.0], [2.0, 5.0]])
    assert explained(predicted, targets) == [pytest.approx(0.5), None]
    assert explained(targets.mean(0).expand(3, 2), targets)[0] == pytest.approx(0.0)


def test_the_report_is_of_the_reported_rows_and_of_the_route_that_the_head_takes() -> None:
    net = RouterHead(HIDDEN)
    report = train_difference(net, KNOWN[:12], ARMS, replace(SETTINGS, epochs=4), threshold=0.5)
    rows = [KNOWN[i] for i in report.fit.reported]
    oracle = Oracle(rows, ARMS)
    routes = [
        {i + 1: ARMS[0] if value > 0.5 else ARMS[1] for i, value in enumerate(net(r.hidden))}
        for r in rows
    ]
    assert oracle.follow(routes).mean_acceptance_length == report.routed
    assert oracle.follow(oracle.single(report.best_single)).mean_acceptance_length == report.single
    figures = report.as_dict()
    assert figures["tokens_per_round"]["oracle"] - figures["tokens_per_round"]["routed"] == (
        pytest.approx(figures["regret"])
    )
    assert figures["fit"]["rows"] == {"train": 8, "stopping": 2, "reported": 2}


def test_nothing_to_gain_is_no_share_of_it() -> None:
    rows = [replace(r, acceptance=torch.ones_like(r.acceptance)) for r in KNOWN[:4]]
    report = train_difference(RouterHead(HIDDEN), rows, ARMS, replace(SETTINGS, epochs=1))
    assert report.captured is None
    assert report.regret == 0.0
    assert report.r2 == {"difference": None}


def test_labels_of_real_drafters_train_a_head() -> None:
    """From texts to a report: the drafters know the target, so that there is something to learn."""
    target = tiny_drafters.markov_target()
    drafters = drafting.neural_drafters(
        eagle=tiny_drafters.agreeing_eagle3(), block=tiny_drafters.agreeing_dflash()
    )
    labeller = RoundLabeller(target, {**drafters, "lookup": LookupDrafter()}, max_length=64)
    follows = tiny_drafters.FOLLOWS
    labels = []
    for salt in range(5):
        prompt = random.Random(salt).choices(list(tiny_drafters.USED), k=6)
        output = [follows[prompt[-1]]]
        while len(output) < 12:
            output.append(follows[output[-1]])
        labels.append(labeller.label(ask(f"{salt}", prompt, 12), output))
    assert all(row.surprises == 0 for row in labels)
    few = replace(SETTINGS, epochs=3)
    for report in (
        train_difference(RouterHead(32), labels, ARMS, few),
        train_acceptance(AcceptanceHead(32, (*ARMS, "lookup")), labels, few),
    ):
        assert 1.0 < report.single <= report.oracle
        assert report.routed <= report.oracle


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(SettingsError, match="three or more"):
        train_difference(RouterHead(HIDDEN), KNOWN[:2], ARMS)
    with pytest.raises(SettingsError, match="autoregressive and a block"):
        train_difference(RouterHead(HIDDEN), KNOWN, ("eagle3",))
    with pytest.raises(SettingsError, match="no labels for 'ddtree'"):
        train_acceptance(AcceptanceHead(HIDDEN, ("eagle3", "ddtree")), KNOWN)
    with pytest.raises(SettingsError, match="walks=0"):
        train_acceptance(AcceptanceHead(HIDDEN, ARMS), KNOWN, walks=0)
    with pytest.raises(SettingsError, match="does not end in a linear layer with a bias of 1"):
        fit(nn.Linear(4, 2), [Examples((torch.ones(2, 4),), torch.ones(2, 1))] * 3, SETTINGS)
    bad = [replace(r, hidden=r.hidden * float("inf")) for r in KNOWN[:4]]
    with pytest.raises(SettingsError, match="the loss is nan"):
        train_difference(RouterHead(HIDDEN), bad, ARMS)


@pytest.mark.parametrize(
    "setting",
    [
        {"batch_size": 0},
        {"epochs": 0},
        {"patience": 0},
        {"stopping": 0.0},
        {"reported": 0.5},
        {"warmup": 1.5},
        {"peak_learning_rate": 0.0},
        {"weight_decay": -1.0},
    ],
)
def test_settings_out_of_range_are_refused_by_name(setting: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match=next(iter(setting))):
        FitSettings(**setting)  # type: ignore[arg-type]
