"""`bench`, `calibrate`, `train router` at the edges: inputs, outputs, failures, interruptions."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import drafter_folder
import pytest
import tiny_folder
import torch
from click.testing import CliRunner, Result
from scripted import write_traces

from whiflash_agents.batch.progress import LineProgress
from whiflash_agents.bench_plot import draw_response
from whiflash_agents.bench_report import tables_of
from whiflash_agents.calibration import FILE
from whiflash_agents.cli import main
from whiflash_agents.engine.routing.labels import RoundLabels

NETWORKS = ("target", "eagle3", "dflash")
LEARNING = [("calibrate",), ("train", "router")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafter_folder.save(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHIFLASH_CACHE", str(tmp_path_factory.getbasetemp() / "study-cache"))


def invoke(*arguments: str | Path, **options: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments], **options)


def bench(folder: Path, output: Path, traces: str | Path, *arguments: str, **more: Any) -> Result:
    """Of the target alone, which is quick."""
    few = ("--max-tokens", "6", "--target", folder / "target", "--no-oracle")
    return invoke("bench", traces, "-o", output, *few, *arguments, **more)


def learn(
    folder: Path,
    command: tuple[str, ...],
    traces: str | Path,
    output: Path,
    *arguments: str | Path,
    **more: Any,
) -> Result:
    """`output` is a folder; a router's file is put in it."""
    place = output / "router.safetensors" if command[0] == "train" else output
    models = [f"--{name}={folder / name}" for name in NETWORKS]
    few = ("--max-tokens", "8", *models)
    return invoke(*command, traces, "-o", place, *few, *arguments, **more)


def too_long(path: Path) -> Path:
    return write_traces(path, {"long": ["word " * 2 * tiny_folder.CONTEXT, "x"]})


# Input ---------------------------------------------------------------------------------------


def test_bench_reads_standard_input_like_a_file(folder: Path, tmp_path: Path) -> None:
    text = (folder / "traces.jsonl").read_bytes()
    result = bench(folder, tmp_path / "bench.json", "-", input=text)
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert figures["rows"] == 3
    assert set(figures["arms"]["none"]["by_category"]) == {"stdin"}


@pytest.mark.parametrize("command", LEARNING)
def test_what_learns_reads_standard_input_too(
    folder: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    text = (folder / "traces.jsonl").read_bytes()
    result = learn(folder, command, "-", tmp_path, input=text)
    assert result.exit_code == 0, result.output
    assert len(list(tmp_path.iterdir())) == 1


def test_bench_reads_a_pipe(folder: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = (folder / "traces.jsonl").read_bytes()
    writing = threading.Thread(target=pipe.write_bytes, args=(text,), daemon=True)
    writing.start()
    result = bench(folder, tmp_path / "bench.json", pipe)
    writing.join(timeout=10)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "bench.json").read_text())["rows"] == 3


@pytest.mark.parametrize("command", [("bench",), *LEARNING])
def test_traces_without_turns_are_refused_before_models_are_loaded(
    folder: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    traces = write_traces(tmp_path / "t.jsonl", {"a": ["only a question"]})
    out = tmp_path / "out"
    out.mkdir()
    if command == ("bench",):
        result = bench(folder, out / "bench.json", traces)
    else:
        result = learn(folder, command, traces, out)
    assert result.exit_code == 2
    assert "no trace holds an assistant turn to replay" in result.stderr
    assert "--mode continue" in result.stderr
    assert "loading" not in result.stderr
    assert list(out.iterdir()) == []


def test_bench_tells_why_rows_failed_and_keeps_the_figures(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    result = bench(folder, output, too_long(tmp_path / "t.jsonl"), env={"COLUMNS": "80"})
    assert result.exit_code == 1, result.output
    figures = json.loads(output.read_text())
    assert (figures["rows"], figures["rows_failed"]) == (0, 1)
    told = figures["errors"]["ContextLengthError"]
    assert told["rows"] == 1
    assert told["first"]["row"] == "long#0"
    assert "leaves no room for a turn" in told["first"]["message"]
    assert figures["arms"]["none"]["tokens_per_second"] == 0
    assert "1 of 1 rows failed: ContextLengthError (1 row; the first, long#0" in result.stderr
    assert "rows that failed" in result.stderr


@pytest.mark.parametrize("command", LEARNING)
def test_what_learns_tells_why_there_is_nothing_to_learn_from(
    folder: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    traces = too_long(tmp_path / "t.jsonl")
    out = tmp_path / "out"
    out.mkdir()
    result = learn(folder, command, traces, out)
    assert result.exit_code == 2
    assert "no turn could be generated" in result.stderr
    assert "ContextLengthError (1 row; the first, long#0" in result.stderr
    assert list(out.iterdir()) == []


# Output --------------------------------------------------------------------------------------


def test_a_router_never_overwrites_what_it_is_trained_from(folder: Path, tmp_path: Path) -> None:
    config, weights = tmp_path / "run.toml", tmp_path / "old.safetensors"
    config.write_text("[sampling]\nmax_tokens = 8\n")
    weights.write_bytes(b"a router")
    inputs = [
        folder / "traces.jsonl",
        config,
        weights,
        folder / "target" / "model.safetensors",
        folder / "eagle3" / "config.json",
        folder / "dflash" / "model.safetensors",
    ]
    models = [f"--{name}={folder / name}" for name in NETWORKS]
    for path in inputs:
        before = path.read_bytes()
        result = invoke(
            "train",
            "router",
            inputs[0],
            "-o",
            path,
            "--overwrite",
            "--config",
            config,
            f"--router-weights={weights}",
            *models,
        )
        assert result.exit_code == 2
        assert f"output {path} is the same file as" in result.stderr
        assert path.read_bytes() == before


def test_a_plot_never_overwrites_figures_or_inputs(folder: Path, tmp_path: Path) -> None:
    traces = tmp_path / "traces.svg"
    traces.write_bytes((folder / "traces.jsonl").read_bytes())
    output = tmp_path / "new.svg"
    for plot in (traces, output, Path(f"{tmp_path}/../{tmp_path.name}/new.svg")):
        result = invoke(
            "bench",
            traces,
            "-o",
            output,
            "--plot",
            plot,
            "--overwrite",
            f"--target={folder / 'target'}",
        )
        assert result.exit_code == 2
        assert "is the same file as" in result.stderr
        assert traces.read_bytes() == (folder / "traces.jsonl").read_bytes()
        assert not output.exists()


@pytest.mark.parametrize(
    ("command", "arguments", "told"),
    [
        ("calibrate", ["-o", "missing"], "output missing is not there; create the folder first"),
        ("calibrate", ["-o", "file"], "output file is a file; name the folder"),
        ("calibrate", ["-o", "/proc"], "output /proc cannot be written"),
        ("bench", ["-o", "b.json", "--plot", "missing/p.png"], "there is no directory missing"),
        ("bench", ["-o", "b.json", "--plot", "p.nothing"], "plot p.nothing ends in .nothing"),
        ("bench", ["-o", "b.json", "--plot", "plot"], "plot plot has no suffix"),
        ("bench", ["-o", "missing/b.json"], "there is no directory missing"),
        ("train router", ["-o", "missing/r.safetensors"], "there is no directory missing"),
        ("train router", ["-o", "-"], "cannot go to standard output (-); name a file"),
        ("train router", ["-o", "here"], "output here is a directory; name a file in it"),
        ("train router", ["-o", "/dev/null", "--overwrite"], "is no regular file"),
        ("train router", ["-o", "/proc/r.safetensors"], "output /proc/r.safetensors cannot be"),
    ],
)
def test_outputs_are_checked_before_anything_is_read(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    arguments: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "here").mkdir()
    models = [f"--{name}={folder / name}" for name in NETWORKS]
    result = invoke(*command.split(), folder / "traces.jsonl", *arguments, *models)
    assert result.exit_code == 2, result.output
    assert told in result.stderr
    assert "checking the input" not in result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "here"]


def test_a_peer_that_fails_does_not_take_the_figures_along(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "bench.json"
    before: list[Any] = []

    def broken(*_: Any, **__: Any) -> Any:
        before.append(json.loads(output.read_text()))
        raise RuntimeError("out of memory")

    monkeypatch.setattr("whiflash_agents.bench.run_transformers", broken)
    result = bench(folder, output, folder / "traces.jsonl", "--peer", "transformers")
    assert result.exit_code == 1
    assert "peer transformers failed: RuntimeError: out of memory" in result.stderr
    figures = json.loads(output.read_text())
    told = {"error": {"type": "RuntimeError", "message": "out of memory"}}
    assert figures["peers"] == {"transformers": told}
    assert before[0]["rows"] == figures["rows"] == 3  # they were kept before it began


# Interruption --------------------------------------------------------------------------------


class Signals(LineProgress):
    """Sends signals to this process when a phase begins."""

    phases: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()

    def phase(self, text: str) -> None:
        super().phase(text)
        if self.numbers and any(phase in text for phase in self.phases):
            number, Signals.numbers = self.numbers[0], self.numbers[1:]
            signal.raise_signal(number)


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> type[Signals]:
    monkeypatch.setattr("whiflash_agents.batch.progress.LineProgress", Signals)
    monkeypatch.setattr("whiflash_agents.bench._TELL_SECONDS", 0.0)
    return Signals


@pytest.mark.parametrize(
    ("numbers", "status", "rows"),
    [
        ((signal.SIGINT,), 130, 2),
        ((signal.SIGTERM,), 143, 2),
        ((signal.SIGINT, signal.SIGINT), 130, 1),
    ],
)
def test_an_interrupted_bench_keeps_figures_of_the_turns_that_are_done(
    folder: Path,
    tmp_path: Path,
    signals: type[Signals],
    numbers: tuple[int, ...],
    status: int,
    rows: int,
) -> None:
    signals.phases, signals.numbers = ("rows by",), numbers[:1]
    output = tmp_path / "bench.json"
    before = signal.getsignal(signal.SIGINT)
    if len(numbers) > 1:  # the second comes while the next turn is generated

        def again(*_: Any) -> None:
            signal.raise_signal(numbers[1])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("whiflash_agents.cli_interrupts.os.write", again)
            result = bench(folder, output, folder / "traces.jsonl")
    else:
        result = bench(folder, output, folder / "traces.jsonl")
    assert result.exit_code == status, result.output
    figures = json.loads(output.read_text())
    assert figures["rows"] == rows
    assert figures["interrupted"] is True
    told = f"interrupted; figures of {rows} turn{'s' * (rows > 1)} are in {output}"
    assert told in result.stderr
    assert signal.getsignal(signal.SIGINT) is before


def test_a_bench_interrupted_in_its_oracles_keeps_the_figures(
    folder: Path, tmp_path: Path, signals: type[Signals]
) -> None:
    signals.phases, signals.numbers = ("labelled 1",), (signal.SIGINT,)
    output = tmp_path / "bench.json"
    result = invoke(
        "bench",
        folder / "traces.jsonl",
        "-o",
        output,
        "--max-tokens",
        "6",
        f"--target={folder / 'target'}",
    )
    assert result.exit_code == 130, result.output
    figures = json.loads(output.read_text())
    assert (figures["rows"], figures["oracle"], figures["interrupted"]) == (3, {}, True)


@pytest.mark.parametrize("command", [("bench",), *LEARNING])
def test_an_interruption_with_nothing_to_keep_says_so(
    folder: Path, tmp_path: Path, signals: type[Signals], command: tuple[str, ...]
) -> None:
    signals.phases, signals.numbers = ("loading",), (signal.SIGTERM,)
    if command == ("bench",):
        result = bench(folder, tmp_path / "bench.json", folder / "traces.jsonl")
    else:
        result = learn(folder, command, folder / "traces.jsonl", tmp_path)
    assert result.exit_code == 143
    assert "whiflash-batch: interrupted; nothing is kept" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", LEARNING)
def test_what_learns_ends_at_once_when_interrupted(
    folder: Path, tmp_path: Path, signals: type[Signals], command: tuple[str, ...]
) -> None:
    signals.phases, signals.numbers = ("labelled 2",), (signal.SIGINT,)
    result = learn(folder, command, folder / "traces.jsonl", tmp_path)
    assert result.exit_code == 130
    assert "whiflash-batch: interrupted; nothing is kept" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [("bench",), *LEARNING])
def test_help_names_the_status_of_an_interruption(command: tuple[str, ...]) -> None:
    assert "130 interrupted" in " ".join(invoke(*command, "--help").stdout.split())


# Calibrations --------------------------------------------------------------------------------


def test_a_damaged_calibration_stops_only_what_needs_it(folder: Path, tmp_path: Path) -> None:
    kept = folder / "dflash" / FILE
    kept.write_text('{"entropy": {"all": {"threshold": 1}}}')
    models = [f"--{name}={folder / name}" for name in NETWORKS]
    few = ("--workers", "0", "--max-tokens", "4", "--limit", "1", *models)
    run = ("run", folder / "traces.jsonl", "-q", *few, "--router")
    try:
        needed = invoke(*run, "entropy")
        assert needed.exit_code == 2
        assert f"{kept} is damaged: models is missing, expected a JSON object" in needed.stderr
        assert "calibrate again" in needed.stderr
        assert invoke(*run, "entropy", "--entropy-threshold", "0.3").exit_code == 0
        assert invoke(*run, "cost-aware").exit_code == 0
        again = invoke("calibrate", folder / "traces.jsonl", "--max-tokens", "8", *models)
        assert again.exit_code == 0, again.output
        assert json.loads(kept.read_text())["rows"] == 3
        assert invoke(*run, "entropy").exit_code == 0
    finally:
        kept.unlink()


# What is printed -----------------------------------------------------------------------------


def figures_of_many() -> dict[str, Any]:
    """Of all contenders, three span kinds, and categories with longish names."""
    names = ("none", "lookup", "eagle3", "dflash", "ddtree", "entropy", "neural", "cost-aware")
    group = {"mean_acceptance_length": 12.34}
    categories = [f"category-of-traces-{n}" for n in range(5)]
    arm = {
        "tokens_per_second": 12345.6,
        "mean_acceptance_length": 12.34,
        "rounds": 123456,
        "round_ms": {"p50": 1234.5, "p95": 12345.6},
        "num_switches": 12345,
        "switch_overhead": 0.12345,
        "router_overhead": 0.12345,
        "by_span": dict.fromkeys(("reasoning", "tool_call", "content"), group),
        "by_category": dict.fromkeys(categories, group),
    }
    rates = {"mean_acceptance_length": 1.2, "tokens_per_second": 9.0}
    single = dict.fromkeys(names[:5], rates)
    per = dict.fromkeys(("task", "prompt", "round_greedy", "round"), rates)
    way = {"tokens_per_second": 12345.6, "none_over_it": 1.23, "rows_identical": 100}
    return {
        "target": "owner/name-of-a-target",
        "rows": 100,
        "rows_failed": 0,
        "rows_identical": 100,
        "arms": dict.fromkeys(names, arm),
        "speedup_over_none": dict.fromkeys(names[1:], 1.234),
        "decode_speedup_over_none": dict.fromkeys(names[1:], 12.34),
        "oracle": {"by_rounds": {"single": single, **per}, "by_seconds": {"single": single, **per}},
        "peers": {"transformers": dict.fromkeys(("plain", "prompt-lookup", "dflash"), way)},
    }


def test_tables_are_whole_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    console = Console(width=80)
    for table in tables_of(figures_of_many()):
        console.print(table)
    told = capsys.readouterr().out
    assert "…" not in told
    whole = (
        "contender",
        "tokens/s",
        "cost-aware",
        "acceptance",
        "ms p95",
        "routing, %",
        "decoding",
    )
    for wanted in (*whole, "category-of-traces-4", "reasoning", "per round greedy", "12345.6"):
        assert wanted in told
    assert max(map(len, told.splitlines())) <= 80


def test_doctor_is_readable_in_80_columns(folder: Path) -> None:
    models = [f"--{name}={folder / name}" for name in NETWORKS]
    result = invoke("doctor", *models, env={"COLUMNS": "80"})
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout
    for wanted in ("packages", "transformers", "KV cache", "ok", "drafters"):
        assert wanted in result.stdout


def test_bench_tells_nothing_of_transformers_own(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    result = bench(folder, output, folder / "traces.jsonl", "--peer", "transformers")
    assert result.exit_code == 0, result.output
    assert "Loading weights" not in result.stderr


def test_one_contender_is_not_told_as_several(
    folder: Path, tmp_path: Path, signals: type[Signals]
) -> None:
    result = learn(folder, ("calibrate",), folder / "traces.jsonl", tmp_path)
    assert result.exit_code == 0, result.output
    assert "1 of 3 rows by 1 contender\n" in result.stderr


def test_a_plot_of_equal_curves_shows_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib import pyplot

    arms = ("lookup", "eagle3", "dflash")
    labels = RoundLabels(
        "row",
        4,
        arms,
        torch.ones(6, 3, dtype=torch.long),
        torch.zeros(6, 3),
        torch.zeros(6),
        torch.zeros(6),
        torch.zeros(6, 2),
    )
    rounds = [{"drafter": "none", "emitted": 1, "position": 1 + i} for i in range(6)]
    output = {"whiflash": {"spans": [{"kind": "content", "start": 0, "end": 7}], "rounds": rounds}}
    row = SimpleNamespace(row=SimpleNamespace(id="row"), outputs={"cost-aware": output})
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    draw_response(SimpleNamespace(labels=[labels], rows=[row]), tmp_path / "plot.png")  # type: ignore[arg-type]
    top = figures[0].axes[0]
    assert top.get_ylim() == (0.0, 2.0)
    lines = top.get_lines()
    assert len({(line.get_linewidth(), line.get_linestyle()) for line in lines}) == 3
    widths = [line.get_linewidth() for line in lines]
    assert widths == sorted(widths, reverse=True)
    assert [text.get_text() for text in top.get_legend().get_texts()] == [*arms, "none"]
