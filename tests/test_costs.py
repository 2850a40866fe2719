"""Measured costs: curves, tables kept between runs, and running averages that follow a change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_drafters
from drafting import neural_drafters
from hypothesis import given
from hypothesis import strategies as st
from small_engines import AlternatingRouter, build

from whiflash_agents import cost_store
from whiflash_agents.embedded import default_agent
from whiflash_agents.engine.costs import CostModel, CostTable, Curve, Tracked
from whiflash_agents.engine.errors import WhiFlashError

TABLE = CostTable(
    verify=Curve([1, 8, 64], [0.010, 0.012, 0.040]),
    attention=2e-6,
    draft={"eagle3": Curve([1, 4], [0.005, 0.011]), "lookup": Curve([1], [0.0001])},
    catch_up={"eagle3": Curve([1, 64], [0.001, 0.003])},
    machine={"device": "cpu", "threads": 2, "contexts": [64, 1024], "repetitions": 5},
)


# Curves -------------------------------------------------------------------------------------------


def test_a_curve_goes_through_its_points_and_straight_between_and_beyond_them() -> None:
    curve = TABLE.verify
    assert [curve.at(n) for n in (1, 8, 64)] == pytest.approx([0.010, 0.012, 0.040])
    assert curve.at(36) == pytest.approx(0.026)
    assert curve.at(120) == pytest.approx(0.068)
    assert (curve.at(0), curve.at(0.5)) == (0.0, 0.010)


def test_a_curve_without_points_costs_nothing_and_one_of_a_single_point_is_flat() -> None:
    assert Curve().at(7) == 0.0
    assert Curve([16], [0.5]).at(1) == Curve([16], [0.5]).at(400) == 0.5


@given(
    st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=8),
    st.floats(0.1, 300.0),
    st.floats(0.0, 50.0),
)
def test_more_never_costs_less_than_the_point_before_it(
    seconds: list[float], count: float, more: float
) -> None:
    curve = Curve([1 << i for i in range(len(seconds))], sorted(seconds))
    assert 0.0 < curve.at(count) <= curve.at(count + more) * (1 + 1e-12)


def test_verification_costs_its_tokens_and_what_they_attend_to() -> None:
    costs = CostModel(TABLE)
    assert costs.verify(8, attended=1000) == pytest.approx(0.012 + 0.002)
    assert costs.draft("eagle3", 2) == pytest.approx(0.007)
    assert costs.catch_up("eagle3", 0) == 0.0
    assert costs.draft("none", 3) == costs.catch_up("nobody", 9) == 0.0


# Tables -------------------------------------------------------------------------------------------


def test_a_table_survives_json() -> None:
    assert CostTable.of(json.loads(json.dumps(TABLE.as_dict()))) == TABLE


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t.pop("verify"),
        lambda t: t.update(verify=[1, 2]),
        lambda t: t["verify"].update(counts=[1, 8]),
        lambda t: t["verify"].update(counts=[8, 1, 64]),
        lambda t: t["verify"].update(counts=[0, 8, 64]),
        lambda t: t["verify"].update(counts=[1, 8.5, 64]),
        lambda t: t["verify"].update(counts=[1, 8, float("inf")]),
        lambda t: t["verify"].update(seconds=[0.01, None, 0.04]),
        lambda t: t["draft"]["eagle3"].update(seconds=[0.01, -0.02]),
        lambda t: t["draft"]["eagle3"].update(seconds=[float("nan"), 0.02]),
        lambda t: t.update(draft=["eagle3"]),
        lambda t: t.update(attention=float("inf")),
        lambda t: t.update(attention="fast"),
        lambda t: t.update(machine=3),
    ],
)
def test_what_is_no_table_is_refused(damage: Callable[[dict[str, Any]], object]) -> None:
    tree = json.loads(json.dumps(TABLE.as_dict()))
    damage(tree)
    with pytest.raises((ValueError, KeyError, TypeError)):
        CostTable.of(tree)


# Running averages ---------------------------------------------------------------------------------


def test_the_first_measurement_is_believed_at_once() -> None:
    tracked = Tracked()
    tracked.observe(0.010, 0.030)
    assert tracked.correction == pytest.approx(3.0)
    assert tracked.error == pytest.approx(2 / 3)


@pytest.mark.parametrize("factor", [0.2, 0.5, 2.0, 8.0])
def test_a_changed_cost_is_met_within_thirty_measurements(factor: float) -> None:
    costs = CostModel(TABLE)
    for _ in range(50):
        costs.observe_draft("eagle3", 1, 0.005)
    assert costs.draft("eagle3", 1) == pytest.approx(0.005)
    off = []
    for _ in range(30):
        costs.observe_draft("eagle3", 1, 0.005 * factor)
        off.append(abs(costs.draft("eagle3", 1) / (0.005 * factor) - 1))
    assert off == sorted(off, reverse=True)
    assert off[-1] < 0.1 < off[0]
    # What was learnt at one size holds at the others.
    assert costs.draft("eagle3", 4) == pytest.approx(0.011 * factor, rel=0.1)


def test_the_reported_error_falls_once_predictions_hold_again() -> None:
    costs = CostModel(TABLE)
    errors = []
    for _ in range(60):
        costs.observe_verify(8, 1000, 0.042)  # three times what the table says
        errors.append(costs.as_dict()["verify"]["error"])
    assert errors[0] == pytest.approx(2 / 3)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01
    assert costs.as_dict()["verify"]["observations"] == 60


def test_one_hiccup_hardly_moves_a_cost() -> None:
    costs = CostModel(TABLE)
    for seconds in [0.005] * 30 + [5.0]:
        costs.observe_draft("eagle3", 1, seconds)
    assert costs.draft("eagle3", 1) < 0.005 * 1.4


def test_kinds_of_cost_are_corrected_apart() -> None:
    costs = CostModel(TABLE)
    costs.observe_draft("eagle3", 1, 0.05)
    costs.observe_catch_up("eagle3", 1, 0.002)
    assert costs.draft("lookup", 1) == pytest.approx(0.0001)
    assert costs.draft("eagle3", 1) == pytest.approx(0.05)
    assert costs.catch_up("eagle3", 64) == pytest.approx(0.006)
    assert costs.verify(1, 0) == pytest.approx(0.010)


def test_without_a_table_the_first_rounds_make_one() -> None:
    costs = CostModel(CostTable())
    assert (costs.verify(8, 64), costs.draft("own", 2), costs.catch_up("own", 9)) == (0, 0, 0)
    costs.observe_verify(8, 64, 0.02)
    costs.observe_draft("own", 2, 0.006)
    costs.observe_catch_up("own", 9, 0.004)
    assert costs.verify(8, 64) == pytest.approx(0.02)
    assert costs.draft("own", 2) == pytest.approx(0.006)
    assert costs.catch_up("own", 9) == pytest.approx(0.004)


# Kept between runs --------------------------------------------------------------------------------


class Kept:
    """Costs of a small engine, kept in a folder of the test's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        from whiflash_agents.engine import cost_calibration

        monkeypatch.setenv("WHIFLASH_CACHE", str(folder))
        monkeypatch.setattr(cost_calibration, "measure_costs", self._measure)
        self.measured = 0
        self.phases: list[str] = []

    def _measure(self, engine: Any) -> CostTable:
        self.measured += 1
        names = list(engine.drafters)
        draft = {name: Curve([1], [0.001 * self.measured]) for name in names}
        catch_up = {name: Curve([1], [0.001]) for name in engine._catch_up.contexts}
        return CostTable(Curve([1, 2], [0.01, 0.02]), 1e-6, draft, catch_up, {"device": "cpu"})

    def costs(
        self,
        *,
        recalibrate: bool = False,
        more: Any = (),
        arms: Any = ("lookup",),
        drafters: Any = None,
        **options: Any,
    ) -> tuple[CostModel, str]:
        return cost_store.load_or_measure(
            build(AlternatingRouter(*arms), drafters, **options),
            key_parts={"more": list(more)},
            recalibrate=recalibrate,
            on_phase=self.phases.append,
        )


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Kept:
    return Kept(monkeypatch, tmp_path / "cache")


def the_file(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache" / "costs").iterdir()
    return path


def test_costs_are_measured_once_and_read_afterwards(kept: Kept, tmp_path: Path) -> None:
    first, told = kept.costs()
    assert kept.phases == ["measuring costs"]
    path = the_file(tmp_path)
    assert "no earlier run kept any" in told
    assert str(path) in told
    again, told = kept.costs()
    assert kept.measured == 1
    assert kept.phases == ["measuring costs"]
    assert told == f"costs read from {path}"
    assert again.table == first.table
    assert again.tracked == {}


def test_costs_that_come_with_the_package_are_taken_on_a_machine_like_theirs(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = kept.costs()
    shipped = tmp_path / "shipped" / "costs"
    shipped.parent.mkdir()
    (tmp_path / "cache" / "costs").rename(shipped)
    monkeypatch.setattr(cost_store.default_agent, "costs", lambda: shipped)
    costs, told = kept.costs()
    assert costs.table == first.table
    assert told == (f"costs read from {next(shipped.iterdir())}, measured on a machine like this")
    kept.costs(more=["another machine"])
    assert kept.measured == 2
    kept.costs(recalibrate=True)
    assert kept.measured == 3
    assert "measured on" not in kept.costs()[1]  # what was measured here goes before


def test_what_belongs_to_the_agent_is_called_the_same_on_every_machine(tmp_path: Path) -> None:
    mine = default_agent.drafter("eagle3")
    assert default_agent.place_of(mine) == f"{default_agent.NAME}/eagle3"
    assert default_agent.place_of(tmp_path) == str(tmp_path)


def test_recalibrating_measures_whatever_is_kept_and_replaces_it(kept: Kept) -> None:
    kept.costs()
    costs, told = kept.costs(recalibrate=True)
    assert costs.table.draft["lookup"].seconds == [0.002]
    assert "as asked for" in told
    assert kept.costs()[0].table == costs.table
    assert kept.measured == 2


@pytest.mark.parametrize(
    "change",
    [
        {"max_running": 3},
        {"max_draft_nodes": 9},
        {"draft_prefill": "full"},
        {"more": ["another folder"]},
        {"arms": ()},
    ],
)
def test_other_settings_and_drafters_have_costs_of_their_own(
    kept: Kept, change: dict[str, Any]
) -> None:
    kept.costs()
    kept.costs(**change)
    assert kept.measured == 2
    kept.costs()
    kept.costs(**change)
    assert kept.measured == 2


def neural(**changes: Any) -> dict[str, Any]:
    models = {
        "eagle": changes.pop("eagle", tiny_drafters.random_eagle3()),
        "block": tiny_drafters.random_dflash(),
    }
    arms = ("eagle3", "dflash", "ddtree")
    return {"arms": arms, "drafters": neural_drafters(**models, **changes)}


@pytest.mark.parametrize(
    "change",
    [
        {"depth": 2},
        {"total_tokens": 9},
        {"nodes": 5},
        {"eagle": tiny_drafters.eagle3(draft_vocab=30)},
    ],
    ids=["depth", "total_tokens", "nodes", "network"],
)
def test_other_trees_and_networks_have_costs_of_their_own(
    kept: Kept, change: dict[str, Any]
) -> None:
    first, _ = kept.costs(**neural())
    assert kept.costs(**neural())[0].table == first.table
    assert kept.measured == 1
    kept.costs(**neural(**change))
    assert kept.measured == 2


def test_a_table_without_one_of_the_networks_is_measured_anew(kept: Kept, tmp_path: Path) -> None:
    kept.costs(**neural())
    _edit(the_file(tmp_path), lambda tree: tree["table"]["catch_up"].pop("dflash"))
    _, told = kept.costs(**neural())
    assert kept.measured == 2
    assert "lacks costs of some drafters" in told


def test_another_number_of_threads_has_costs_of_its_own(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    kept.costs()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    kept.costs()
    assert kept.measured == 2


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:200]), "damaged"),
        (lambda p: p.write_bytes(b""), "damaged"),
        (lambda p: p.write_bytes(b"\xff\xfe\x00"), "damaged"),
        (lambda p: p.write_text("[" * 100_000), "damaged"),
        (lambda p: p.write_text("[]"), "not a file of costs"),
        (lambda p: _edit(p, lambda t: t.update(format="something")), "not a file of costs"),
        (lambda p: _edit(p, lambda t: t.update(version=99)), "has version 99, expected 1"),
        (lambda p: _edit(p, lambda t: t.pop("key")), "it lacks 'key'"),
        (lambda p: _edit(p, lambda t: t["key"].update(torch="0.1")), "for something else"),
        (lambda p: _edit(p, lambda t: t["table"].update(attention=-1)), "number of seconds"),
        (lambda p: _edit(p, lambda t: t["table"]["draft"].clear()), "lacks costs of some drafters"),
        (
            lambda p: _edit(p, lambda t: t["table"].update(verify={"counts": [], "seconds": []})),
            "lacks costs",
        ),
    ],
)
def test_a_file_that_cannot_be_trusted_is_measured_anew_and_told(
    kept: Kept, tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    kept.costs()
    path = the_file(tmp_path)
    damage(path)
    costs, told = kept.costs()
    assert kept.measured == 2
    assert costs.table.draft["lookup"].seconds == [0.002]
    assert reason in told
    assert str(path) in told
    assert kept.costs()[1] == f"costs read from {path}"


def test_a_file_that_cannot_be_read_is_measured_anew_and_told(kept: Kept, tmp_path: Path) -> None:
    kept.costs()
    path = the_file(tmp_path)
    path.unlink()
    path.mkdir()
    _, told = kept.costs()
    assert kept.measured == 2
    assert "cannot be read" in told
    assert "not kept" in told


def test_costs_that_cannot_be_kept_are_used_all_the_same(kept: Kept, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    costs, told = kept.costs()
    assert costs.table.verify.counts == [1, 2]
    assert "not kept" in told


def test_a_write_that_fails_leaves_what_was_there(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.costs()
    before = the_file(tmp_path).read_bytes()

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cost_store.os, "replace", full)
    _, told = kept.costs(recalibrate=True)
    assert "No space left on device" in told
    assert the_file(tmp_path).read_bytes() == before  # and nothing lies beside it


def test_an_engine_at_work_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from small_engines import ask

    monkeypatch.setenv("WHIFLASH_CACHE", str(tmp_path))
    engine = build("lookup")
    engine.add(ask("busy"))
    with pytest.raises(WhiFlashError, match="idle"):
        cost_store.load_or_measure(engine, key_parts={}, recalibrate=False, on_phase=print)
    assert list(tmp_path.iterdir()) == []
