"""Neural drafters from the command line: found, checked against the target, and without effect on
what is generated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import drafter_folder
import pytest
from click.testing import CliRunner, Result

from whiflash_agents.batch import generated_part
from whiflash_agents.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafter_folder.save(tmp_path_factory.mktemp("models"))


def run(folder: Path, *arguments: str) -> Result:
    fixed = ("--workers", "0", "--target", str(folder / "target"), "--max-tokens", "24")
    return CliRunner().invoke(main, ("run", str(folder / "traces.jsonl"), *fixed, *arguments))


def rows(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.split("\n") if line]


@pytest.mark.parametrize(
    ("router", "network", "options"),
    [
        ("eagle3", "eagle3", []),
        ("eagle3", "eagle3", ["--eagle3-top-k", "1", "--draft-prefill", "full"]),
        ("dflash", "dflash", ["--catch-up", "eager"]),
        ("ddtree", "dflash", ["--ddtree-nodes", "7", "--max-backlog", "4"]),
    ],
)
def test_rows_are_those_of_plain_decoding_and_tell_who_drafted(
    folder: Path, tmp_path: Path, router: str, network: str, options: list[str]
) -> None:
    plain = rows(run(folder, "--router", "none"))
    metrics = tmp_path / "metrics.json"
    drafted = rows(
        run(
            folder,
            *("--router", router, f"--{network}", str(folder / network), *options),
            *("--metrics", str(metrics)),
        )
    )
    assert [generated_part(row) for row in drafted] == [generated_part(row) for row in plain]
    for row in drafted:
        assert set(row["whiflash"]["speculative_decoding"]["by_drafter"]) == {router}
    engine = json.loads(metrics.read_text())["engines"][0]["engine"]
    assert set(engine["kv_bytes"]) == {"target", network}
    assert engine["draft_rows"][network] > 0
    assert 0 < engine["catch_up_seconds"] < engine["step_seconds"]


def test_tree_settings_reach_the_drafter(folder: Path) -> None:
    result = run(
        folder,
        *("--router", "eagle3", "--eagle3", str(folder / "eagle3"), "--rounds"),
        *("--eagle3-top-k", "2", "--eagle3-depth", "3", "--eagle3-tokens", "5"),
    )
    drafted = [r["drafted"] for row in rows(result) for r in row["whiflash"]["rounds"]]
    assert max(drafted) == 5


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--router", "eagle3"], "--router: 'eagle3' drafts with an EAGLE-3 checkpoint"),
        (["--router", "ddtree"], "give its folder or hub name as dflash (--dflash)"),
        (["--router", "dflash", "--dflash", "./nowhere"], "there is no folder ./nowhere"),
        (["--router", "dflash", "--dflash", "{eagle3}"], "holds an EAGLE-3 drafter"),
        (["--router", "eagle3", "--eagle3", "{target}"], "holds no drafter that is known"),
        (["--router", "eagle3", "--eagle3", "{other}"], "target_hidden_size"),
        (
            ["--router", "eagle3", "--eagle3", "{eagle3}", "--eagle3-tokens", "65"],
            "--eagle3-tokens: 65 is more than max_draft_nodes=64",
        ),
    ],
)
def test_a_drafter_that_does_not_belong_is_refused_before_anything_runs(
    folder: Path, tmp_path: Path, arguments: list[str], told: str
) -> None:
    output = tmp_path / "rows.jsonl"
    places = {name: str(folder / name) for name in ("eagle3", "target", "other")}
    result = run(folder, *(a.format(**places) for a in arguments), "-o", str(output))
    assert result.exit_code == 2
    assert told in result.stderr
    assert not output.exists()


def test_a_drafter_that_the_router_does_not_use_is_told(folder: Path) -> None:
    result = run(folder, "--router", "lookup", "--dflash", str(folder / "dflash"))
    assert rows(result)
    assert "without effect under router lookup: --dflash" in result.stderr


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(main, ("doctor", *arguments))


def test_doctor_finds_packages_devices_models_and_what_drafters_cost(folder: Path) -> None:
    places = [(f"--{name}", str(folder / name)) for name in ("target", "eagle3", "dflash")]
    result = doctor(*(part for place in places for part in place))
    assert result.exit_code == 0, result.stdout
    shown = " ".join(result.stdout.replace("│", " ").split())
    for wanted in ("torch", "cores", "reads hidden states", "feature buffer", "KV cache, dflash"):
        assert wanted in shown
    # two layers, two heads of eight, keys and values in float32
    assert f"{2 * 2 * 2 * 8 * 4:,} bytes a position" in shown


def test_doctor_tells_a_drafter_of_another_target_and_fails(folder: Path) -> None:
    result = doctor("--target", str(folder / "target"), "--eagle3", str(folder / "other"))
    assert result.exit_code == 1
    assert "wrong" in result.stdout


def test_doctor_tells_a_missing_model(tmp_path: Path) -> None:
    result = doctor("--target", str(tmp_path / "none"))
    assert result.exit_code == 1
    assert "there is no folder" in result.stdout
