"""`examples/run_batch.py` gives what the command line gives."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import tiny_folder
from click.testing import CliRunner

from whiflash_agents.batch import generated_part
from whiflash_agents.cli import main

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_example_writes_the_rows_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_folder.save(tmp_path / "tiny"))
    by_example, by_command = tmp_path / "example.jsonl", tmp_path / "command.jsonl"
    same = ["--target", model, "--max-tokens", "12", "--limit", "3", "--workers", "0"]
    arguments = ["run_batch.py", *same, "--output", str(by_example)]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(EXAMPLES / "run_batch.py"), run_name="__main__")
    assert "acceptance length" in capsys.readouterr().out
    command = ["run", str(EXAMPLES / "traces.jsonl"), *same, "-o", str(by_command), "-q"]
    result = CliRunner().invoke(main, command)
    rows = [
        [generated_part(json.loads(line)) for line in path.read_bytes().split(b"\n") if line]
        for path in (by_example, by_command)
    ]
    assert rows[0] == rows[1]
    assert len(rows[0]) >= 3
    assert result.exit_code == int(any(row["error"] for row in rows[1]))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["missing.jsonl"], "missing.jsonl: cannot be read"),
        (["--max-tokens", "0"], "max_tokens: 0 is not valid"),
        (["--output", "rows.jsonl"], "rows.jsonl already holds something"),
        (["--output", "rows.jsonl", "--overwrite", "--target", "./nowhere"], "nowhere"),
    ],
)
def test_example_tells_wrong_use_in_one_line(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("done\n")
    monkeypatch.setattr(sys, "argv", ["run_batch.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "run_batch.py"), run_name="__main__")
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert told in errors
    assert errors.count("\n") == 1
    assert Path("rows.jsonl").read_text() == "done\n"
