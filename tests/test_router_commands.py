"""`calibrate` and `train router`: what they find is kept, used, and worth what they say."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import drafter_folder
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from whiflash_agents.batch import LocalRunner, WhiFlashBatch, generated_part
from whiflash_agents.calibration import FILE, Calibration, Threshold, find_thresholds
from whiflash_agents.cli import main
from whiflash_agents.engine.costs import CostModel, CostTable, Curve
from whiflash_agents.engine.errors import CheckpointError
from whiflash_agents.engine.routing.labels import RoundLabels
from whiflash_agents.engine.routing.neural import NeuralRouter, RouterHead, save_router
from whiflash_agents.engine.routing.neural_acceptance import AcceptanceHead, save_acceptance
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
    # It holds for the weights, whatever their folder is called and whatever dtype they are in.
    shutil.copytree(folder / "eagle3", tmp_path / "renamed")
    same = {"eagle3": str(tmp_path / "renamed"), "dtype": "bfloat16"}
    assert rows_of(folder, router="entropy", **same)[1]["entropy_threshold"] == value
    # Not for another drafter, though the folder has the same name.
    other = another_eagle3(folder, tmp_path / "eagle3")
    engine = rows_of(folder, router="entropy", eagle3=str(other))[1]
    assert engine["entropy_threshold"] == 0.5
    (note,) = engine["notes"]
    assert "router entropy: threshold 0.5 nats (the default; the calibration in" in note
    assert re.search(r"for other models: eagle3 'eagle3' \(\w{8}\), here 'eagle3' \(", note)
    (folder / "dflash" / FILE).unlink()


def another_eagle3(folder: Path, place: Path) -> Path:
    """A copy of the EAGLE-3 drafter with one number changed."""
    shutil.copytree(folder / "eagle3", place)
    tensors = load_file(place / "model.safetensors")
    tensors["fc.weight"][0, 0] += 1.0
    save_file(tensors, place / "model.safetensors")
    return place


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ([], "(the default; no calibration of this pair in"),
        (["--entropy-threshold", "0.25"], "threshold 0.25 nats (as --entropy-threshold says)"),
        (["--config", "run.toml"], "0.125 nats (as run.toml: [routing] entropy_threshold says)"),
    ],
)
def test_a_run_tells_its_entropy_threshold_and_where_it_is_from(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("[routing]\nentropy_threshold = 0.125\n")
    few = ("--workers", "0", "--max-tokens", "2", "--limit", "1", *places(folder), *settings)
    result = invoke("run", str(folder / "traces.jsonl"), "--router", "entropy", *few)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("router entropy: threshold") == 1
    assert told in result.stderr


MODELS = {"target": "t", "eagle3": "e", "dflash": "d"}
THRESHOLD = {"value": 0.7, "tokens_per_second": 10.0, "mean_acceptance_length": 2.0, "tried": []}
WHOLE = {"models": MODELS, "identity": MODELS, "rows": 3, "entropy": {"all": THRESHOLD}}


def test_a_calibration_is_read_as_it_was_kept(tmp_path: Path) -> None:
    kept = Calibration(MODELS, MODELS, 3, {"all": Threshold(0.7, 10.0, 2.0, [[0.7, 10.0]])})
    assert Calibration.load(tmp_path) is None
    kept.save(tmp_path)
    assert Calibration.load(tmp_path) == kept
    assert kept.unlike(MODELS) == []
    assert kept.unlike(MODELS | {"eagle3": "x"}) == ["eagle3"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"models": None}, "models is missing, expected a JSON object"),
        ({"identity": {"target": 3}}, "identity.target is 3, expected a text"),
        ({"rows": "many"}, 'rows is "many", expected a number of texts'),
        ({"entropy": {}}, "entropy.all is missing, expected the threshold over all texts"),
        ({"entropy": {"all": 0.5}}, "entropy.all is 0.5, expected a JSON object"),
        (
            {"entropy": {"all": THRESHOLD | {"value": math.nan}}},
            "entropy.all.value is NaN, expected a finite number",
        ),
        (
            {"neural": {"all": {"threshold": 1}}},
            "neural.all.value is missing, expected a number",
        ),
    ],
)
def test_a_damaged_calibration_is_told_by_its_field(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    (tmp_path / FILE).write_text(json.dumps(WHOLE | change))
    with pytest.raises(CheckpointError) as refused:
        Calibration.load(tmp_path)
    assert f"{tmp_path / FILE} is damaged: {told}" in str(refused.value)
    assert "run whiflash-batch calibrate again" in str(refused.value)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(CheckpointError, match="it is no JSON; remove the file"):
        Calibration.load(tmp_path)


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
    assert "already holds something" in again.stderr
    # It says what it was trained for, and a run with something else warns.
    assert "notes" not in engine or not any("warning" in note for note in engine["notes"])
    other = str(another_eagle3(folder, tmp_path / "eagle3"))
    notes = rows_of(folder, router=kind, router_weights=str(output), eagle3=other)[1]["notes"]
    (warning,) = (note for note in notes if note.startswith("warning"))
    assert f"router {output} was trained for other models" in warning
    assert re.search(r"eagle3 'eagle3' \(\w{8}\), here 'eagle3' \(\w{8}\)", warning)
    assert "target" not in warning


def test_a_router_that_does_not_say_what_it_was_trained_for_is_used_without_a_word(
    folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "router.safetensors"
    save_router(NeuralRouter(RouterHead(32)), path)
    (note,) = rows_of(folder, router="neural", router_weights=str(path))[1]["notes"]
    assert note.startswith("router neural: threshold that of its weights; no calibration")


@pytest.mark.parametrize("kind", ["neural", "cost-aware"])
def test_a_bench_and_a_calibration_give_weights_to_the_router_that_they_are_for(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    weights = tmp_path / "router.safetensors"
    if kind == "neural":
        save_router(NeuralRouter(RouterHead(32)), weights)
    else:
        save_acceptance(AcceptanceHead(32, ("lookup", "eagle3", "dflash", "ddtree")), weights)
    few = ["--max-tokens", "6", *places(folder), f"--router-weights={weights}"]
    traces, output = str(folder / "traces.jsonl"), tmp_path / "bench.json"
    result = invoke("bench", traces, "-o", str(output), *few, "--no-oracle")
    assert result.exit_code == 0, result.stderr
    assert ("neural" in json.loads(output.read_text())["arms"]) is (kind == "neural")
    kept = tmp_path / "kept"
    kept.mkdir()
    found = invoke("calibrate", traces, "-o", str(kept), *few)
    if kind == "neural":
        assert found.exit_code == 0, found.stderr
        assert json.loads((kept / FILE).read_text())["neural"]["all"]["value"]
    else:
        assert found.exit_code == 2
        assert "they are for router cost-aware, which has no threshold" in found.stderr


def test_a_setting_without_effect_is_told(folder: Path) -> None:
    few = ["--workers", "0", "--max-tokens", "2", "--limit", "1", "--router", "none"]
    place = f"--target={folder / 'target'}"
    result = invoke("run", str(folder / "traces.jsonl"), *few, place, "--exploration", "0.3")
    assert result.exit_code == 0
    assert "without effect under router none: --exploration" in result.stderr


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
        (["--router", "cost-aware", "--router-weights", "."], "'.' is a folder; give the file"),
        (["--exploration", "nan"], "--exploration: nan is not valid"),
        (["--exploration", "2"], "--exploration: 2.0 is not valid"),
        (["--entropy-threshold", "inf"], "--entropy-threshold: inf is not valid"),
    ],
)
def test_what_a_router_lacks_is_told(folder: Path, arguments: list[str], told: str) -> None:
    target = ["--target", str(folder / "target"), "--workers", "0"]
    if "neural" in arguments:
        target += places(folder)[1:]
    result = invoke("run", str(folder / "traces.jsonl"), *target, *arguments)
    assert result.exit_code == 2
    assert told in result.stderr
