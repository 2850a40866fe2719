"""Inputs that hold no record at all, and traces that hold no turn: neither passes in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from scripted import write_traces

from whiflash_agents.batch.plan import check_input
from whiflash_agents.cli import main

EMPTY = ["", "\n\n \r\n", "[]", " [ ]\n"]


def cli(*arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=input)


@pytest.mark.parametrize(
    ("text", "suffix"),  # a line of a .jsonl file is a record, also an empty list
    [(text, suffix) for text in EMPTY for suffix in (".json", "")]
    + [(text, ".jsonl") for text in EMPTY if "[" not in text],
)
def test_validate_warns_of_a_file_without_records(tmp_path: Path, text: str, suffix: str) -> None:
    path = tmp_path / f"t{suffix}"
    path.write_text(text)
    result = cli("validate", str(path))
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    assert line.startswith(f"{path}: holds no records (")
    assert line.endswith("[warning]")


def test_validate_does_not_warn_of_a_file_whose_records_are_all_bad(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("{oops\n")
    assert "holds no records" not in cli("validate", str(path)).stdout
    assert "holds no records" not in cli("validate", str(tmp_path / "missing.jsonl")).stdout


@pytest.mark.parametrize("text", EMPTY)
def test_run_over_no_record_at_all_is_one_error_and_status_2(tmp_path: Path, text: str) -> None:
    first, second, output = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "rows.jsonl"
    first.write_text(text)
    second.write_text(text)
    result = cli("run", str(first), str(second), "--workers", "0", "-q", "-o", str(output))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert f"{first}, {second}: no record found" in line
    assert not output.exists()


def test_run_over_empty_standard_input_names_it(tmp_path: Path) -> None:
    result = cli("run", "-", "--workers", "0", "-q", input="")
    assert result.exit_code == 2
    assert "<stdin>: no record found" in result.stderr


def test_one_input_with_records_is_enough(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    full = write_traces(tmp_path / "t.jsonl", {"x": ["a", "A"]})
    assert check_input([empty, full], "replay", format=None, limit=None).rows == 1


def test_traces_without_a_turn_are_no_failure_and_the_remedy_is_named(tmp_path: Path) -> None:
    traces = write_traces(tmp_path / "t.jsonl", {"a": ["only a question"]})
    result = cli("run", str(traces), "--workers", "0")
    assert result.exit_code == 0
    assert "--mode continue" in result.stderr


def test_continuing_after_an_assistant_turn_is_told(tmp_path: Path) -> None:
    traces = write_traces(tmp_path / "t.jsonl", {"a": ["q", "a"], "b": ["q"]})
    told = check_input([traces], "continue", format=None, limit=None)
    assert (told.traces, told.rows, told.ending_in_a_turn) == (2, 2, 1)
    result = cli("run", str(traces), "--mode", "continue", "--workers", "0", "--target", "./none")
    assert "1 of 2 traces end with an assistant turn" in result.stderr
    replayed = cli("run", str(traces), "--workers", "0", "--target", "./none")
    assert "end with an assistant turn" not in replayed.stderr


def test_validate_takes_a_limit_as_run_does(tmp_path: Path) -> None:
    path = write_traces(tmp_path / "t.jsonl", {"x": ["a", "A"]})
    with path.open("a") as file:
        file.write("{oops\n")
    assert cli("validate", str(path)).exit_code == 2
    assert cli("validate", str(path), "--limit", "1").exit_code == 0
    assert cli("validate", str(path), "--limit", "0").exit_code == 2


def test_help_tells_every_exit_status() -> None:
    told = " ".join(cli("run", "--help").stdout.split("Exit status")[1].split())
    for part in ("1 some rows failed or the run broke off", "holds no record", "143 by SIGTERM"):
        assert part in told
