"""The command line, end to end on a tiny model: exit status, streams, options, interrupts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_folder
from click.testing import CliRunner, Result
from scripted import write_traces

from whiflash_agents.batch import RunFigures, generated_part
from whiflash_agents.batch.progress import LineProgress
from whiflash_agents.cli import main
from whiflash_agents.settings import Settings, sections

TRACES = {
    "a": ["What is up?", "Much.", "And now?", "Little."],
    "b": ["Hello!", "Hi."],
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_folder.save(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def traces(tmp_path: Path) -> str:
    return str(write_traces(tmp_path / "traces.jsonl", TRACES))


def cli(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(main, arguments, **options)


def run(model: str, *arguments: str, **options: Any) -> Result:
    """`run` in this process with few tokens."""
    few = ("--workers", "0", "--target", model, "--max-tokens", "8")
    return cli("run", *few, *arguments, **options)


def rows(text: str) -> list[dict[str, Any]]:
    # Not splitlines(): text of a turn may hold U+2028 and its like, which JSON does not escape.
    return [json.loads(line) for line in text.split("\n") if line]


def test_rows_go_to_the_file_and_everything_else_to_stderr(
    model: str, traces: str, tmp_path: Path
) -> None:
    output, metrics = tmp_path / "rows.jsonl", tmp_path / "metrics.json"
    result = run(model, traces, "-o", str(output), "--metrics", str(metrics), "--rounds")
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert "loading tiny" in result.stderr
    assert "acceptance length" in result.stderr
    done = rows(output.read_text())
    assert [row["custom_id"] for row in done] == ["a#0", "a#1", "b#0"]
    assert all(row["whiflash"]["rounds"] for row in done)
    assert all(row["response"]["body"]["model"] == "tiny" for row in done)
    assert json.loads(metrics.read_text())["rows"]["ok"] == 3


def test_quiet_run_writes_rows_to_stdout_and_nothing_else(model: str, traces: str) -> None:
    result = run(model, traces, "--quiet")
    assert result.exit_code == 0
    assert len(rows(result.stdout)) == 3
    assert result.stderr == ""


def test_routers_and_recorded_drafts_change_no_turn(model: str, traces: str) -> None:
    sampled = ("--temperature", "0.8", "--seed", "4", "-q")
    plain = run(model, traces, *sampled)
    lookup = run(model, traces, *sampled, "--router", "lookup")
    without = run(model, traces, *sampled, "--router", "lookup", "--no-recorded-drafts")
    expected = [generated_part(row) for row in rows(plain.stdout)]
    assert [generated_part(row) for row in rows(lookup.stdout)] == expected
    assert [generated_part(row) for row in rows(without.stdout)] == expected
    other = run(model, traces, "--temperature", "0.8", "--seed", "5", "-q")
    assert [generated_part(row) for row in rows(other.stdout)] != expected


def test_row_that_fails_gives_status_1_and_the_others_are_done(model: str, tmp_path: Path) -> None:
    traces = write_traces(
        tmp_path / "t.jsonl", {"long": ["word " * 2 * tiny_folder.CONTEXT, "x"], "b": ["q", "a"]}
    )
    result = run(model, str(traces), "-q")
    assert result.exit_code == 1
    failed, done = rows(result.stdout)
    assert failed["error"]["type"] == "ContextLengthError"
    assert failed["error"]["retriable"] is False
    assert done["error"] is None


def test_standard_input_is_read_like_a_file(model: str, traces: str) -> None:
    from_file = run(model, traces, "-q")
    from_stdin = run(model, "-", "-q", input=Path(traces).read_bytes())
    assert from_stdin.exit_code == 0
    assert list(map(generated_part, rows(from_stdin.stdout))) == list(
        map(generated_part, rows(from_file.stdout))
    )


def test_settings_come_from_file_and_environment_too(
    model: str, traces: str, tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        "[run]\nlimit = 1\nworkers = 0\n[sampling]\nmax_tokens = 5\nignore_eos = true\n"
    )
    result = cli("run", traces, "-q", "--config", str(config), env={"WHIFLASH_TARGET": model})
    assert result.exit_code == 0, result.output
    assert [len(row["whiflash"]["token_ids"]) for row in rows(result.stdout)] == [5, 5]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--router", "neural", "--target", "owner/model"],
            "--router: 'neural' drafts with an EAGLE-3 checkpoint, and none is",
        ),
        (["--router", "lokup"], "did you mean 'lookup'?"),
        (["--max-tokens", "0"], "--max-tokens: 0 is not valid: expected at least 1"),
        (["--temperature", "-1"], "--temperature: -1.0 is not valid"),
        (["--config", "missing.toml"], "missing.toml: cannot read the settings"),
        (["--target", "./no-such-folder"], "no-such-folder"),
        (["--format", "opnai"], "expected one of"),
        (["--metrics", "no-such-folder/m.json"], "metrics no-such-folder/m.json cannot be written"),
        (["-o", "."], "output . is a directory"),
        (["--resume"], "No such option"),
    ],
)
def test_wrong_use_is_one_sentence_on_stderr_and_status_2(
    traces: str, arguments: list[str], expected: str
) -> None:
    result = cli("run", traces, "--workers", "0", *arguments)
    assert result.exit_code == 2
    assert expected in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_unreadable_input_is_told_with_file_and_line_and_status_2(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}\n{"messages": 3}\n')
    result = cli("run", str(path), "--workers", "0")
    assert result.exit_code == 2
    assert f"{path}:2: messages" in result.stderr
    missing = cli("run", str(tmp_path / "none.jsonl"), "--workers", "0")
    assert missing.exit_code == 2
    assert "none.jsonl: cannot be read: No such file" in missing.stderr


def test_existing_output_is_kept_unless_overwrite_is_given(
    model: str, traces: str, tmp_path: Path
) -> None:
    output = tmp_path / "rows.jsonl"
    output.write_text("done\n")
    refused = run(model, traces, "-o", str(output))
    assert refused.exit_code == 2
    assert "already holds something" in refused.stderr
    assert output.read_text() == "done\n"
    assert run(model, traces, "-o", str(output), "--overwrite").exit_code == 0
    assert len(rows(output.read_text())) == 3


def test_output_that_is_the_input_is_refused(model: str, traces: str) -> None:
    before = Path(traces).read_bytes()
    result = run(model, traces, "-o", traces, "--overwrite")
    assert result.exit_code == 2
    assert "is the same file as" in result.stderr
    assert Path(traces).read_bytes() == before


def test_input_without_turns_is_said_and_is_no_failure(model: str, tmp_path: Path) -> None:
    traces = write_traces(tmp_path / "t.jsonl", {"a": ["only a question"]})
    result = run(model, str(traces))
    assert result.exit_code == 0
    assert "nothing to generate" in result.stderr


def test_stop_strings_may_be_given_more_than_once(model: str, traces: str) -> None:
    plain = rows(run(model, traces, "-q", "--limit", "1").stdout)[0]
    content = plain["response"]["body"]["choices"][0]["message"]["content"]
    stop = content[len(content) // 2 :][:2]
    result = run(model, traces, "-q", "--limit", "1", "--stop", "\x00never", "--stop", stop)
    stopped = rows(result.stdout)[0]
    assert stopped["whiflash"]["stop_reason"] == stop
    cut = stopped["response"]["body"]["choices"][0]["message"]["content"] or ""
    assert cut == content[: content.index(stop)]


def test_every_setting_has_an_option_whose_help_shows_its_default() -> None:
    options = {option.name: option for option in main.commands["run"].params}
    defaults = Settings()
    for field, section in sections().items():
        default = getattr(getattr(defaults, section), field)
        text = options[field].help
        if default not in (None, False, []):
            shown = {True: "on"}.get(default, default)
            shown = f"{shown:g}" if isinstance(shown, float) else str(shown)
            assert f"[default: {shown}]" in text or f"[default: {float(default):g}]" in text
        assert options[field].default is None
    others = {"traces", "output", "overwrite", "metrics", "config", "quiet"}
    assert set(options) == set(sections()) | others


def test_every_command_has_help_with_an_example() -> None:
    for name in main.commands:
        result = cli(name, "--help")
        assert result.exit_code == 0
        assert f"whiflash-batch {name} " in result.output.split("Example")[1]


def test_validate_tells_every_problem_and_loads_no_model(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"id": "x", "messages": [{"role": "user", "content": "x"}]}\n'
        '{"messages": 3}\n\n{oops\n{"messages": [{"role": "user", "content": 3}]}\n'
    )
    result = cli("validate", str(path))
    assert result.exit_code == 2
    told = result.stdout.splitlines()
    assert [line.split(" ")[0] for line in told] == [f"{path}:{n}:" for n in (1, 2, 4, 5)]
    assert told[0].endswith("[warning]")
    assert all(line.endswith("[error]") for line in told[1:])
    assert "messages[0].content" in told[3]
    assert "errors" in result.stderr


def test_validate_passes_good_files_and_refuses_an_unknown_format(traces: str) -> None:
    result = cli("validate", traces)
    assert (result.exit_code, result.stdout) == (0, "")
    assert cli("validate", traces, "--format", "opnai").exit_code == 2


def bad_traces(path: Path, records: int) -> Path:
    path.write_text('{"messages": 3}\n' * records)
    return path


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_validate_tells_in_one_sentence_that_its_output_cannot_be_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "whiflash_agents.cli", "validate"]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [*command, str(bad_traces(tmp_path / "t.jsonl", 3))],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert ended.stderr == (
        "whiflash-batch: error: standard output: cannot write: No space left on device\n"
    )
    assert ended.returncode == 1


def test_validate_ends_quietly_when_its_reader_has_seen_enough(tmp_path: Path) -> None:
    path = str(bad_traces(tmp_path / "t.jsonl", 20_000))
    process = subprocess.Popen(
        [sys.executable, "-m", "whiflash_agents.cli", "validate", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert "t.jsonl:1" in process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 1
    process.stderr.close()


class SignalWhileLoading(LineProgress):
    def phase(self, text: str) -> None:
        super().phase(text)
        if text.startswith("loading"):
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_while_the_model_is_loaded_says_so(
    model: str, traces: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whiflash_agents.batch.progress.LineProgress", SignalWhileLoading)
    result = run(model, traces)
    assert result.exit_code == 130
    assert result.stdout == ""
    assert capfd.readouterr().err == "\nwhiflash-batch: interrupted\n"


class Signals(LineProgress):
    """Sends signals to this process once a row is done."""

    numbers: tuple[int, ...] = ()

    def update(self, figures: RunFigures) -> None:
        if figures.ok and self.numbers:
            number, self.numbers = self.numbers[0], self.numbers[1:]
            signal.raise_signal(number)


@pytest.mark.parametrize(
    ("numbers", "status"),
    [
        ((signal.SIGINT,), 130),
        ((signal.SIGTERM,), 143),
        ((signal.SIGINT, signal.SIGINT), 130),
    ],
)
def test_interrupt_keeps_finished_rows_and_ends_with_its_status(
    model: str,
    tmp_path: Path,
    numbers: tuple[int, ...],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Signals, "numbers", numbers)
    monkeypatch.setattr("whiflash_agents.batch.progress.LineProgress", Signals)
    traces = write_traces(tmp_path / "t.jsonl", {f"t{n}": ["q", "a"] for n in range(50)})
    output, metrics = tmp_path / "rows.jsonl", tmp_path / "metrics.json"
    before = signal.getsignal(signal.SIGINT)
    result = run(model, str(traces), "-o", str(output), "--metrics", str(metrics))
    assert result.exit_code == status
    done = rows(output.read_text())
    assert 1 <= len(done) < 50
    figures = json.loads(metrics.read_text())
    assert figures["interrupted"] is True
    assert figures["rows"]["ok"] == len(done)
    assert "(interrupted)" in result.stderr
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_ends_a_run_with_an_actor_and_only_rows_are_on_stdout(
    model: str, tmp_path: Path
) -> None:
    traces = write_traces(tmp_path / "t.jsonl", {f"t{n}": ["q", "a"] for n in range(3000)})
    command = [sys.executable, "-m", "whiflash_agents.cli", "run", str(traces), "--target", model]
    told = tmp_path / "stderr"
    with told.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, "--max-tokens", "60", "--ignore-eos", "--workers", "1"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process of the run gets it
    lines += process.stdout.readlines()
    assert process.wait(timeout=60) == 130, told.read_text()
    errors = told.read_text()
    assert "keeping finished rows" in errors
    assert "Traceback" not in errors
    done = [json.loads(line) for line in lines]
    assert [row["custom_id"] for row in done[:3]] == ["t0#0", "t1#0", "t2#0"]
    assert len(done) < 3000
    assert all(len(row["whiflash"]["token_ids"]) == 60 for row in done)
