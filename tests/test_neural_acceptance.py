"""The neural acceptance predictor: its formula, what it falls back to, and its files."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from whiflash_agents.engine.errors import CheckpointError, SettingsError
from whiflash_agents.engine.routing.acceptance import HOPE
from whiflash_agents.engine.routing.base import NONE
from whiflash_agents.engine.routing.cost_aware import CostAwareRouter
from whiflash_agents.engine.routing.neural import NeuralRouter, RouterHead, save_router
from whiflash_agents.engine.routing.neural_acceptance import (
    AcceptanceHead,
    NeuralAcceptance,
    load_acceptance,
    save_acceptance,
    scalar_features,
)
from whiflash_agents.engine.routing.signals import Signals
from whiflash_agents.engine.telemetry import RoundRecord

HIDDEN, ARMS = 24, ("a", "b")


def head(seed: int = 0) -> AcceptanceHead:
    torch.manual_seed(seed)
    made = AcceptanceHead(HIDDEN, ARMS)
    with torch.no_grad():  # lengths above 1, so that the lower bound hides nothing
        made.outputs.bias += 4.0
    return made


def sequence(hidden: torch.Tensor | None = None, name: str = "s") -> Any:
    signals = None if hidden is None else Signals(0.7, 2.5, hidden)
    return SimpleNamespace(id=name, tokens=[1], signals=signals)


def test_each_arm_has_one_output_on_the_shared_trunk_and_the_scalar_features() -> None:
    network = head()
    predictor = NeuralAcceptance(network)
    assert network.trunk[0].weight.shape == (HIDDEN // 8, HIDDEN)
    assert predictor.signals == {"entropy", "hidden"}
    row = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))
    told = sequence(row)
    predictor.predict([told], ARMS)
    predictor.observe(told, RoundRecord(0, "a", 8, 2, 3))
    recent = predictor._recent.predict([told], ARMS)[0]
    assert recent[0] < HOPE == recent[1]
    inner = network.trunk[0](row)
    inner = inner * 0.5 * (1.0 + torch.erf(inner / math.sqrt(2.0)))
    scalars = torch.tensor([math.log(1.7), math.log(3.5), *recent])
    expected = network.outputs.weight @ torch.cat([inner, scalars]) + network.outputs.bias
    ((none, second, first),) = predictor.predict([told], (NONE, "b", "a"))
    assert none == 1.0
    assert [first, second] == pytest.approx(expected.tolist(), abs=1e-5)


def test_lengths_are_never_below_the_bonus_token() -> None:
    network = head()
    with torch.no_grad():
        network.outputs.bias -= 100.0
    assert NeuralAcceptance(network).predict([sequence(torch.zeros(HIDDEN))], ARMS) == [[1.0, 1.0]]


def test_recent_acceptance_serves_before_signals_and_for_arms_it_was_not_trained_on() -> None:
    predictor = NeuralAcceptance(head())
    calls: list[int] = []
    predictor.head.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))  # type: ignore
    rows = torch.randn(2, HIDDEN).bfloat16()
    found = predictor.predict(
        [sequence(rows[0], "x"), sequence(None, "y"), sequence(rows[1], "z")], ("a", "new")
    )
    assert calls == [2]  # all sequences in one call
    assert found[1] == [HOPE, HOPE]
    assert found[0][0] != HOPE != found[2][0]
    assert found[0][1] == found[2][1] == HOPE


def test_what_it_predicts_decides_the_cost_aware_router() -> None:
    from whiflash_agents.engine.costs import CostModel, CostTable, Curve

    network = head()
    with torch.no_grad():
        network.outputs.weight.zero_()
        network.outputs.weight[:, 0] = torch.tensor([8.0, -8.0])
        network.outputs.bias.copy_(torch.tensor([3.0, 3.0]))
        network.trunk[0].weight.zero_()
        network.trunk[0].weight[0, 0] = 1.0
        network.trunk[0].bias.zero_()
    router = CostAwareRouter(ARMS, NeuralAcceptance(network), exploration=0.0)
    curve = Curve([1, 64], [0.02, 0.021])
    costs = CostModel(CostTable(curve, draft={arm: Curve([1], [0.001]) for arm in ARMS}))
    around: Any = SimpleNamespace(
        costs=costs,
        available=lambda arm, sequence: True,
        network=lambda arm: None,
        backlog=lambda arm, sequence: 0,
        evidence=lambda arm, sequence: None,
    )
    router.bind(around)
    first = torch.zeros(HIDDEN)
    first[0] = 1.0  # GELU(1) = 0.84: arm a gains, arm b loses 6.7
    told = sequence(first)
    for _ in range(4):  # each arm is tried once
        (arm,) = router.route([told])
        router.observe(told, RoundRecord(0, arm, 8, 2, 3, round_seconds=0.02))
    assert router.route([told]) == ["a"]
    assert router.predicted(told) == pytest.approx(3.0 + 8.0 * 0.8413, abs=1e-3)


def test_a_saved_head_predicts_the_same_when_loaded(tmp_path: Path) -> None:
    save_acceptance(head(4), tmp_path / "acceptance.safetensors")
    loaded = load_acceptance(tmp_path / "acceptance.safetensors", hidden_size=HIDDEN)
    told = [sequence(row) for row in torch.randn(5, HIDDEN)]
    assert loaded.head.arms == ARMS
    assert loaded.predict(told, ARMS) == NeuralAcceptance(head(4)).predict(told, ARMS)


def test_files_that_do_not_fit_are_refused_with_both_values(tmp_path: Path) -> None:
    path = tmp_path / "acceptance.safetensors"
    save_acceptance(head(), path)
    with pytest.raises(CheckpointError, match="'hidden_size' is 24, expected 32"):
        load_acceptance(path, hidden_size=32)
    save_router(NeuralRouter(RouterHead(HIDDEN)), path)
    with pytest.raises(CheckpointError, match="'kind' is 'neural', expected 'acceptance'") as wrong:
        load_acceptance(path, hidden_size=HIDDEN)
    assert "trained for router neural, and router cost-aware was asked" in str(wrong.value)
    assert "train router --kind cost-aware`, or route with --router neural" in str(wrong.value)
    save_acceptance(AcceptanceHead(HIDDEN, ("a", NONE)), path)
    with pytest.raises(CheckpointError, match=r"'arms' is \['a', 'none'\]"):
        load_acceptance(path, hidden_size=HIDDEN)
    wrong = AcceptanceHead(HIDDEN, ARMS)
    wrong.outputs = torch.nn.Linear(7, 3)
    save_acceptance(wrong, path)
    with pytest.raises(CheckpointError, match=r"'outputs.weight' has shape \[3, 7\], expected"):
        load_acceptance(path, hidden_size=HIDDEN)


def test_a_head_without_different_arms_is_refused() -> None:
    with pytest.raises(SettingsError, match="expected names of different drafters"):
        NeuralAcceptance(AcceptanceHead(HIDDEN, ("a", "a")))


def test_scalar_features_are_finite_for_any_signals() -> None:
    features = scalar_features(Signals(-1e-6, 0.0), [1.0])
    assert features == [0.0, 0.0, 1.0]
