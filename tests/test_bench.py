"""`whiflash-batch bench`: all contenders on the same rows, measured, identical, and told."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import drafter_folder
import pytest
from click.testing import CliRunner, Result

from whiflash_agents.batch.progress import SilentProgress
from whiflash_agents.bench import Bench
from whiflash_agents.bench_figures import Contender
from whiflash_agents.cli import main
from whiflash_agents.engine.drafters.eagle3 import Eagle3Drafter
from whiflash_agents.settings import Settings

ALL = ["none", "lookup", "eagle3", "dflash", "ddtree", "entropy", "cost-aware"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafter_folder.save(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHIFLASH_CACHE", str(tmp_path_factory.getbasetemp() / "bench-cache"))


def places(folder: Path) -> list[str]:
    return [f"--{name}={folder / name}" for name in ("target", "eagle3", "dflash")]


def bench(folder: Path, output: Path, *arguments: str) -> Result:
    fixed = [str(folder / "traces.jsonl"), "-o", str(output), "--max-tokens", "12"]
    return CliRunner().invoke(main, ["bench", *fixed, *places(folder), *arguments])


def test_bench_writes_what_other_programs_read_and_prints_tables(
    folder: Path,
    tmp_path: Path,
) -> None:
    output, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    result = bench(folder, output, "--plot", str(plot), "--peer", "transformers")
    assert result.exit_code == 0, result.stderr
    figures = json.loads(output.read_text())
    assert list(figures["arms"]) == ALL
    assert figures["rows"] == 3
    assert figures["outputs_identical"] is True
    assert set(figures["speedup_over_none"]) == set(ALL) - {"none"}
    assert set(figures["decode_speedup_over_none"]) == set(ALL) - {"none"}
    for arm in figures["arms"].values():
        assert arm["decode_tokens_per_second"] > 0
        by_category = arm["by_category"]["traces"]
        assert by_category["decode_tokens_per_second"] == arm["decode_tokens_per_second"]
        assert arm["tokens"] == figures["arms"]["none"]["tokens"] > 0
        assert arm["seconds"] > 0
        assert arm["round_ms"]["p95"] >= arm["round_ms"]["p50"] > 0
        assert set(arm["by_category"]) == {"traces"}
        assert 0 <= arm["router_overhead"] < 0.5
    assert figures["arms"]["none"]["mean_acceptance_length"] == 1.0
    assert 0 < figures["router_overhead"] < 0.5
    by_rounds = figures["oracle"]["by_rounds"]
    lengths = {name: by_rounds[name]["mean_acceptance_length"] for name in ("prompt", "round")}
    singles = [arm["mean_acceptance_length"] for arm in by_rounds["single"].values()]
    assert max(singles) <= lengths["prompt"] <= lengths["round"]
    assert figures["oracle"]["by_seconds"]["round"]["tokens_per_second"] > 0
    peer = figures["peers"]["transformers"]
    assert {"plain", "prompt-lookup", "dflash"} <= set(peer)
    assert all(way["rows_identical"] == 3 for way in peer.values())
    assert plot.read_bytes().startswith(b"\x89PNG")
    for wanted in ("cost-aware", "3 of 3 rows identical", "per round", "prompt-lookup"):
        assert wanted in result.stderr


def test_labels_reproduce_what_the_arms_really_accepted(folder: Path) -> None:
    """The oracle's single arms are the arms as they ran, lookup with the rows before it."""
    settings = Settings.of(
        **{name: str(folder / name) for name in ("target", "eagle3", "dflash")},
        workers=0,
        max_tokens=12,
    )
    running = Bench(settings, progress=SilentProgress())
    figures = running.run([folder / "traces.jsonl"])
    for arm in ("eagle3", "dflash", "ddtree", "lookup"):
        single = figures["oracle"]["by_rounds"]["single"][arm]
        assert single["rounds"] == figures["arms"][arm]["rounds"]


def test_a_slowed_arm_is_seen_to_cost_more_and_is_chosen_less(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("target", "eagle3")
    settings = Settings.of(
        **{name: str(folder / name) for name in names}, workers=0, max_tokens=40, recalibrate=True
    )

    def measured() -> tuple[float, float, dict[str, Any]]:
        running = Bench(settings, progress=SilentProgress(), oracle=False)
        figures = running.run([folder / "traces.jsonl"])
        its = figures["arms"]["cost-aware"]
        rounds = {name: group["num_spec_steps"] for name, group in its["by_drafter"].items()}
        share = rounds.get("eagle3", 0) / sum(rounds.values())
        return running._sessions["cost-aware"].costs.draft("eagle3", 1), share, figures

    cost, share, figures = measured()
    draft = Eagle3Drafter.draft

    def slow(self: Any, *args: Any) -> Any:
        time.sleep(0.06)
        return draft(self, *args)

    monkeypatch.setattr(Eagle3Drafter, "draft", slow)
    slow_cost, slow_share, slow_figures = measured()
    assert slow_cost > cost + 0.03
    assert slow_share <= share
    assert slow_share < 0.2
    p50 = [f["arms"]["eagle3"]["round_ms"]["p50"] for f in (figures, slow_figures)]
    assert p50[1] > p50[0] + 30


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--plot", "p.png", "--no-oracle"], "leave out --no-oracle"),
        (["--peer", "transformers", "--temperature", "1", "--no-oracle"], "greedy decoding"),
    ],
)
def test_what_bench_cannot_do_is_told(
    folder: Path,
    tmp_path: Path,
    arguments: list[str],
    told: str,
) -> None:
    result = bench(folder, tmp_path / "bench.json", *arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_existing_figures_are_not_overwritten(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    output.write_text("mine")
    result = bench(folder, output, "--no-oracle")
    assert result.exit_code == 2
    assert output.read_text() == "mine"


def test_decoding_is_counted_without_prompts() -> None:
    def output(rounds: list[tuple[int, float]]) -> dict[str, Any]:
        count = {"num_spec_steps": len(rounds), "num_draft_tokens": 0, "num_switches": 0}
        figures = count | {"num_accepted_draft_tokens": 0, "by_span": {}, "by_drafter": {}}
        records = [
            {"emitted": n, "round_seconds": s, "catch_up_seconds": 0.0, "switched": False}
            for n, s in rounds
        ]
        extra = {"seconds": 9.0, "rounds": records, "speculative_decoding": figures}
        usage = {"completion_tokens": 1 + sum(n for n, _ in rounds)}
        return {"response": {"body": {"usage": usage}}, "whiflash": extra}

    contender = Contender()
    contender.add(output([(3, 0.5), (1, 0.5)]), "a")
    contender.add(output([(2, 1.0)]), "b")
    contender.add(output([]), "b")  # the token that the prompt gave was the last one
    assert contender.decode_rates == [4.0, 2.0, 0.0]
    figures = contender.as_dict({"route_seconds": 0.0, "step_seconds": 0.0})
    assert figures["decode_tokens_per_second"] == 3.0
    rates = {n: its["decode_tokens_per_second"] for n, its in figures["by_category"].items()}
    assert rates == {"a": 4.0, "b": 2.0}
