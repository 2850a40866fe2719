"""`calibrate` and `train router`: what they find is kept, used, and worth what they say."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import drafter_folder
import pytest
import torch
from click.testing import CliRunner, Result

from whiflash_agents.batch import LocalRunner, WhiFlashBatch, generated_part
from whiflash_agents.calibration import FILE, Calibration, Threshold, find_thresholds
from whiflash_agents.cli import main
from whiflash_agents.engine.costs import CostModel, CostTable, Curve
from whiflash_agents.engine.errors import CheckpointError
from whiflash_agents.engine.routing.labels import RoundLabels
from whiflash_agents.settings import Settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafter_folder.save(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHIFLASH_CACHE", str(tmp_path_factory.getbasetemp() / "router-cache"))


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def places(folder: Path) -> list[str]:
    return [f"--{name}={folder / name}" for name in ("target", "eagle3", "dflash")]


def rows_of(folder: Path, **changes: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    names = ("target", "eagle3", "dflash")
    given = {name: str(folder / name) for name in names} | {"workers": 0, "max_tokens": 12}
    batch = WhiFlashBatch(Settings.of(**(given | changes)), runner=LocalRunner)
    rows = [generated_part(row) for row in batch.rows([folder / "traces.jsonl"])]
    return rows, batch.figures.engines[0]


def labels_of(entropy: list[float], eagle3: list[int], dflash: list[int]) -> RoundLabels:
    count = len(entropy)
    return RoundLabels(
        id="row",
        num_prompt=10,
        arms=("eagle3", "dflash"),
        acceptance=torch.tensor([eagle3, dflash]).T,
        drafted=torch.tensor([[4, 4]] * count),
        entropy=torch.tensor(entropy),
        margin=torch.zeros(count),
        hidden=torch.zeros(count, 3),
    )


def test_the_threshold_found_is_the_one_that_takes_least_time() -> None:
    # Above 1 nat EAGLE-3 accepts everything, below only DFlash does.
    entropy = [0.2, 2.0, 0.3, 1.5, 0.1, 1.8, 0.4, 0.2]
    hard = [value > 1.0 for value in entropy]
    left = [len(entropy) - i for i in range(len(entropy))]
    eagle3 = [min(2, n) if h else 1 for h, n in zip(hard, left, strict=True)]
    dflash = [1 if h else min(2, n) for h, n in zip(hard, left, strict=True)]
    labels = [labels_of(entropy, eagle3, dflash)]
    curve = Curve([1], [0.01])
    costs = CostModel(CostTable(Curve([1], [0.02]), draft={"eagle3": curve, "dflash": curve}))
    found = find_thresholds(labels, [entropy], ["a"], costs)
    assert set(found) == {"all"}
    assert 0.4 <= found["all"].value < 1.5
    assert found["all"].mean_acceptance_length == 2.0
    best = max(rate for _, rate in found["all"].tried)
    assert found["all"].tokens_per_second == best
    two = find_thresholds(labels * 2, [entropy] * 2, ["a", "b"], costs)
    assert set(two) == {"all", "a", "b"}


def test_calibrate_keeps_thresholds_that_runs_then_use(folder: Path, tmp_path: Path) -> None:
    traces = str(folder / "traces.jsonl")
    assert rows_of(folder, router="entropy")[1]["entropy_threshold"] == 0.5
    result = invoke("calibrate", traces, "--max-tokens", "12", *places(folder))
    assert result.exit_code == 0, result.stderr
    kept = json.loads((folder / "dflash" / FILE).read_text())
    value = kept["entropy"]["all"]["value"]
    assert f"{value:.3f}" in result.stderr
    rows, engine = rows_of(folder, router="entropy")
    assert engine["entropy_threshold"] == value
    assert rows == rows_of(folder, router="none")[0]
    assert rows_of(folder, router="entropy", entropy_threshold=2.5)[1]["entropy_threshold"] == 2.5
    # Not for another EAGLE-3 drafter.
    shutil.copytree(folder / "eagle3", tmp_path / "another")
    other = rows_of(folder, router="entropy", eagle3=str(tmp_path / "another"))
    assert other[1]["entropy_threshold"] == 0.5
    (folder / "dflash" / FILE).unlink()


def test_a_damaged_calibration_is_told(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(CheckpointError, match=f"{FILE} is no calibration"):
        Calibration.load(tmp_path, target="t", eagle3="e")
    threshold = Threshold(0.7, 10.0, 2.0, [[0.7, 10.0]])
    Calibration("t", "e", 3, {"all": threshold}).save(tmp_path)
    found = Calibration.load(tmp_path, target="t", eagle3="e")
    assert found is not None
    assert found.entropy == {"all": threshold}
    assert Calibration.load(tmp_path, target="t", eagle3="x") is None


@pytest.mark.parametrize("kind", ["neural", "cost-aware"])
def test_a_trained_router_routes_a_run_whose_output_is_the_same(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    output = tmp_path / "router.safetensors"
    traces = str(folder / "traces.jsonl")
    arguments = ["--kind", kind, "--max-tokens", "24", *places(folder)]
    result = invoke("train", "router", traces, "-o", str(output), *arguments)
    assert result.exit_code == 0, result.stderr
    assert "R²" in result.stderr
    assert "share of its gain" in result.stderr
    rows, engine = rows_of(folder, router=kind, router_weights=str(output))
    assert rows == rows_of(folder, router="none")[0]
    assert engine["engine"]["route_seconds"] > 0
    again = invoke("train", "router", traces, "-o", str(output), *arguments)
    assert again.exit_code == 2
    assert "exists already" in again.stderr


@pytest.mark.parametrize("router", ["entropy", "cost-aware"])
def test_routed_runs_generate_what_plain_ones_do(folder: Path, router: str) -> None:
    for changes in ({}, {"temperature": 0.8, "verify_budget": "gain"}, {"concurrency": 3}):
        rows, engine = rows_of(folder, router=router, rounds=True, **changes)
        assert rows == rows_of(folder, router="none", **changes)[0]
        assert engine["engine"]["rounds"] > 0


def test_costs_are_kept_between_runs_and_measured_anew_when_asked(folder: Path) -> None:
    first = rows_of(folder, router="cost-aware", recalibrate=True)[1]
    again = rows_of(folder, router="cost-aware")[1]
    assert "measured" in first["costs"]
    assert "read from" in again["costs"]
    errors = [its["error"] for its in again["engine"]["costs"].values()]
    assert all(math.isfinite(error) for error in errors)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--router", "neural"], "needs a trained router"),
        (["--router", "entropy", "--no-recorded-drafts"], "drafts with an EAGLE-3 checkpoint"),
        (["--router", "cost-aware", "--router-weights", "./nowhere"], "nowhere"),
    ],
)
def test_what_a_router_lacks_is_told(folder: Path, arguments: list[str], told: str) -> None:
    target = ["--target", str(folder / "target"), "--workers", "0"]
    if "neural" in arguments:
        target += places(folder)[1:]
    result = invoke("run", str(folder / "traces.jsonl"), *target, *arguments)
    assert result.exit_code == 2
    assert told in result.stderr
