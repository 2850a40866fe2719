"""What a run tells on stderr: lines, and the summary."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from whiflash_agents.batch.figures import RunFigures, Speculation
from whiflash_agents.batch.plan import InputCount
from whiflash_agents.batch.progress import LineProgress, summary_table


def figures() -> RunFigures:
    return RunFigures(
        target="tiny",
        input=InputCount(traces=4, rows=10, traces_without_turns=1),
        ok=3,
        failed=1,
        generated_tokens=1200,
        running_seconds=20.0,
        speculation=Speculation(steps=100, drafted=400, accepted=150),
        by_drafter={"lookup": Speculation(steps=100, accepted=150)},
        by_span={"tool_call": Speculation(steps=10, accepted=40)},
        engines=[
            {"engine": {"output_tokens": 800, "positions_prefilled": 5000}},
            {"engine": {"output_tokens": 700, "positions_prefilled": 1000}},
        ],
    )


def test_line_tells_rows_rates_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    LineProgress().update(figures())
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == (
        "whiflash-batch: 4/10 rows, 6,000 prompt tokens read, 1 failed, 75.0 tokens/s, "
        "acceptance length 2.50, about 30 s left\n"
    )


def test_lines_come_at_most_once_per_interval(capsys: pytest.CaptureFixture[str]) -> None:
    progress = LineProgress(interval=3600.0)
    for _ in range(5):
        progress.update(figures())
    assert capsys.readouterr().err.count("\n") == 1


def test_last_line_tells_all_rows_once(capsys: pytest.CaptureFixture[str]) -> None:
    progress = LineProgress(interval=3600.0)
    running = figures()
    progress.update(running)
    running.ok = 9
    progress.update(running)
    progress.close()
    progress.close()
    told = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in told] == [
        "whiflash-batch: 4/10 rows",
        "whiflash-batch: 10/10 rows",
    ]


def test_last_line_is_not_told_twice(capsys: pytest.CaptureFixture[str]) -> None:
    progress = LineProgress()
    progress.phase("loading")
    progress.update(figures())
    progress.close()
    assert capsys.readouterr().err.count("4/10 rows") == 1


def test_summary_shows_what_was_done_and_what_was_not() -> None:
    done = figures()
    done.interrupted = True
    done.errors["ContextLengthError"] = 1
    done.compared["tool_name"], done.equal["tool_name"] = 4, 3
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(summary_table(done))
    shown = " ".join(console.export_text().split())
    for part in (
        "tiny (interrupted)",
        "rows ok │ 3",
        "rows failed │ 1",
        "ContextLengthError │ 1",
        "rows not done │ 6",
        "traces without assistant turn │ 1",
        "generated tokens │ 1,200",
        "tokens/s │ 60.0",
        "acceptance length │ 2.50",
        "drafter lookup │ 2.50 in 100 rounds",
        "span tool_call │ 5.00 in 10 rounds",
        "agreement tool_name │ 75.0 % (3/4)",
    ):
        assert part in shown
    assert "agreement text" not in shown
