"""`whiflash-batch train eagle3|dflash`: from traces to a drafter that others load."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_folder
from click.testing import CliRunner, Result
from scripted import write_traces

from whiflash_agents.batch import LocalRunner, WhiFlashBatch
from whiflash_agents.cli import main
from whiflash_agents.engine.training.feature_source import ComputedFeatures
from whiflash_agents.engine.training.loop import StepReport
from whiflash_agents.settings import Settings
from whiflash_agents.training_folder import TrainingFolder
from whiflash_agents.training_progress import SilentTraining

FEATURES = {"eagle3": "0,1", "dflash": "1,2"}  # a target of two layers has not the usual ones
SHORT = ("--max-tokens", "12", "--held-out", "0.2", "--epochs", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and twelve traces of two turns, with the target's responses."""
    root = tmp_path_factory.mktemp("training")
    tiny_folder.save(root / "target")
    write_traces(
        root / "traces.jsonl",
        {f"t{n}": [f"Question {n}?", "Yes.", "And?", "No."] for n in range(12)},
    )
    return root


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, Path]:
    """One of each kind, trained in one go."""
    for kind in FEATURES:
        result = train(folder, kind, folder / kind)
        assert result.exit_code == 0, result.stderr
    return {kind: folder / kind for kind in FEATURES}


def train(folder: Path, kind: str, output: Path, *options: str) -> Result:
    return CliRunner().invoke(main, arguments(folder, kind, output, *options))


def arguments(folder: Path, kind: str, output: Path, *options: str) -> list[str]:
    fixed = [str(folder / "traces.jsonl"), "-o", str(output), "--target", str(folder / "target")]
    fixed += ["--responses", str(folder / "responses.jsonl"), *SHORT]
    if "--init" not in options:
        fixed += ["--feature-layers", FEATURES[kind]]
        if kind == "dflash":
            fixed += ["--layers", "2"]
    return ["train", kind, *fixed, *options]


def weights(output: Path) -> bytes:
    return (output / "model.safetensors").read_bytes()


# What comes of it --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_what_is_trained_drafts_in_a_run_and_says_what_it_is(
    folder: Path, trained: dict[str, Path], kind: str
) -> None:
    output = trained[kind]
    assert {path.name for path in output.iterdir()} == {
        *("README.md", "config.json", "model.safetensors", "training")
    }
    settings = Settings.of(
        target=str(folder / "target"), router=kind, workers=0, max_tokens=12, **{kind: str(output)}
    )
    run = WhiFlashBatch(settings, runner=LocalRunner)
    rows = list(run.rows([folder / "traces.jsonl"]))
    assert all(row["response"] is not None for row in rows)
    assert run.figures.by_drafter[kind].steps > 0
    card = (output / "README.md").read_text()
    for wanted in (
        "drafter for target",
        "`traces.jsonl`: 12 traces with 24 assistant turns",
        "responses (mode replay): the target's own answers to every recorded history, greedily",
        "seed 0, 2 epochs of 4 texts per step",
        "whiflash-batch",
        "| held-out loss |",
        f"| {kind} | all |",
        "| held-out acceptance length (greedy drafts from anywhere) |",
        "training's own, on 4 held-out texts after the last step",
        "along 4 held-out texts (mode replay, greedily), with the weights as they are saved",
        f"- {kind}: {'trees of up to 60 tokens' if kind == 'eagle3' else 'a block as a chain'}",
    ):
        assert wanted in card
    assert str(folder) not in card.split("```")[2]  # files are named, folders are not


def test_acceptance_is_that_of_a_run_with_the_drafter_alone(
    folder: Path, trained: dict[str, Path]
) -> None:
    result = train(folder, "eagle3", trained["eagle3"])
    (line,) = [x for x in result.stderr.splitlines() if "eagle3" in x and " all " in x]
    cells = [cell.strip() for cell in line.strip("│ ").split("│")]
    rounds, length = int(cells[3]), float(cells[2])
    held = [json.loads(x) for x in (folder / "responses.jsonl").read_text().splitlines()[1:]]
    settings = Settings.of(
        target=str(folder / "target"),
        router="eagle3",
        workers=0,
        max_tokens=12,
        eagle3=str(trained["eagle3"]),
    )
    run = WhiFlashBatch(settings, runner=LocalRunner)
    found = {r["custom_id"]: r["whiflash"] for r in run.rows([folder / "traces.jsonl"])}
    told = held_out_traces(folder)
    mine = [found[r["id"]] for r in held if r["id"].split("#")[0] in told]
    assert rounds == sum(extra["speculative_decoding"]["num_spec_steps"] for extra in mine)
    tokens = sum(len(extra["token_ids"]) - 1 for extra in mine)
    assert length == pytest.approx(tokens / rounds, abs=0.006)


def held_out_traces(folder: Path) -> set[str]:
    from whiflash_agents.engine.training.held_out import split_texts
    from whiflash_agents.engine.training.texts import TrainingText
    from whiflash_agents.training_texts import trace_of

    texts = [TrainingText(f"t{n}#0", (1, 2), ((1, 2),)) for n in range(12)]
    return {trace_of(text) for text in split_texts(texts, 0.2, group=trace_of)[1]}


def test_responses_are_shared_between_drafters(folder: Path, trained: dict[str, Path]) -> None:
    kept = (folder / "responses.jsonl").read_bytes()
    assert kept.count(b"\n") == 25
    result = train(folder, "dflash", trained["dflash"])
    assert "24 responses are in" in result.stderr
    assert (folder / "responses.jsonl").read_bytes() == kept


def test_responses_go_beside_the_output_unless_they_are_named(folder: Path, tmp_path: Path) -> None:
    given = arguments(folder, "eagle3", tmp_path / "e", "--limit", "3", "--epochs", "0.1")
    at = given.index("--responses")
    result = CliRunner().invoke(main, given[:at] + given[at + 2 :])
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "responses.jsonl").read_bytes().count(b"\n") == 7


def test_progress_and_figures_are_told_and_quiet_says_nothing(
    folder: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    result = train(folder, "dflash", tmp_path / "d", "--block-size", "4", "--layers", "1")
    assert result.exit_code == 0, result.stderr
    for wanted in (
        "texts with",
        "held out",
        "step 10/10, loss",
        "first token",
        "held-out texts after step 10: loss",
        "DFlash for",
        "tokens per round on",
        "ddtree",
    ):
        assert wanted in result.stderr
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["block_size"] == 4
    assert config["num_hidden_layers"] == 1
    quiet = train(folder, "eagle3", tmp_path / "e", "-q", "--held-out", "0", "--draft-vocab", "90")
    assert (quiet.exit_code, quiet.stderr, quiet.stdout) == (0, "", "")
    assert json.loads((tmp_path / "e" / "config.json").read_text())["draft_vocab_size"] == 90


# Going on ----------------------------------------------------------------------------------------


def test_a_finished_training_is_left_as_it_is(folder: Path, trained: dict[str, Path]) -> None:
    before = weights(trained["eagle3"])
    result = train(folder, "eagle3", trained["eagle3"])
    assert result.exit_code == 0
    assert "10 of 10" in result.stderr
    assert weights(trained["eagle3"]) == before


def test_time_that_is_up_is_status_1_and_the_same_command_goes_on(
    folder: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    output, statuses = tmp_path / "e", []
    for _ in range(20):
        result = train(folder, "eagle3", output, "--minutes", "0.0005")
        statuses.append(result.exit_code)
        if result.exit_code == 0:
            break
        assert "unfinished; the same command goes on" in result.stderr
        assert not (output / "config.json").exists()
    assert statuses == [1] * (len(statuses) - 1) + [0]
    assert len(statuses) > 1
    assert weights(output) == weights(trained["eagle3"])


def test_a_command_that_is_killed_goes_on_and_ends_the_same(
    folder: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    output = tmp_path / "e"
    given = arguments(folder, "eagle3", output, "--checkpoint-minutes", "0")
    running = subprocess.Popen(
        [sys.executable, "-m", "whiflash_agents.cli", *given],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    while running.poll() is None and not list(output.glob("training/step-*")):
        time.sleep(0.005)
    os.kill(running.pid, signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    assert not (output / "config.json").exists()
    result = train(folder, "eagle3", output)
    assert result.exit_code == 0, result.stderr
    assert weights(output) == weights(trained["eagle3"])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_keeps_the_step_at_hand(
    folder: Path,
    trained: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    status: int,
) -> None:
    def interrupting(self: SilentTraining, report: StepReport) -> None:
        if report.step == 4:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(SilentTraining, "step", interrupting)
    result = train(folder, "dflash", tmp_path / "d", "-q")
    assert result.exit_code == status
    assert [p.name for p in (tmp_path / "d" / "training").glob("step-*")] == ["step-00000004"]
    monkeypatch.undo()
    assert train(folder, "dflash", tmp_path / "d").exit_code == 0
    assert weights(tmp_path / "d") == weights(trained["dflash"])


def test_other_settings_are_refused_until_it_is_begun_anew(
    folder: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    output = tmp_path / "e"
    first = train(folder, "eagle3", output, "--minutes", "0.0005")
    assert first.exit_code == 1
    for options, told in (
        (("--learning-rate", "0.01"), "(--learning-rate: 0.001, now 0.01)"),
        (("--steps", "3"), "(--steps: 7, now 3)"),
        (("--draft-vocab", "90"), "(--draft-vocab: "),
        (("--no-warm-start",), "(--warm-start, now --no-warm-start)"),
        (("--held-out", "0"), "(the turns that texts are made of: 20, now 24)"),
    ):
        result = train(folder, "eagle3", output, *options)
        assert result.exit_code == 2
        assert told in result.stderr
        assert "--restart" in result.stderr
    (output / "training" / "wanted.json").unlink()  # as for recorded turns: the texts are compared
    result = train(folder, "eagle3", output, "--held-out", "0")
    assert "(the texts: 20, now 24)" in result.stderr
    result = train(folder, "eagle3", output, "--no-warm-start", "--restart")
    assert result.exit_code == 0, result.stderr
    assert weights(output) != weights(trained["eagle3"])
    assert train(folder, "eagle3", output, "--restart").exit_code == 0  # over a finished one
    assert weights(output) == weights(trained["eagle3"])


def test_a_drafter_can_be_gone_on_with_on_its_own_drafts(
    folder: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    given = ("--init", str(trained["dflash"]), "--objective", "on-policy", "--epochs", "1")
    result = train(folder, "dflash", tmp_path / "d", *given)
    assert result.exit_code == 0, result.stderr
    assert weights(tmp_path / "d") != weights(trained["dflash"])
    config, before = (
        json.loads((path / "config.json").read_text())
        for path in (tmp_path / "d", trained["dflash"])
    )
    assert config == before


# Features and recorded turns ---------------------------------------------------------------------


def test_features_on_disk_train_the_same_drafter_and_are_computed_once(
    folder: Path, trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    compute = ComputedFeatures.__call__

    def counted(self: ComputedFeatures, text: Any) -> Any:
        calls.append(text.id)
        return compute(self, text)

    monkeypatch.setattr(ComputedFeatures, "__call__", counted)
    result = train(folder, "eagle3", tmp_path / "e", "--features", str(tmp_path / "f"))
    assert result.exit_code == 0, result.stderr
    assert "KiB are still to be written" in result.stderr
    assert len(calls) == len(set(calls)) == 24
    assert weights(tmp_path / "e") == weights(trained["eagle3"])
    other = train(folder, "dflash", tmp_path / "d", "--features", str(tmp_path / "f"))
    assert other.exit_code == 2
    assert "holds features of something else (--feature-layers: 0,1, now 1,2)" in other.stderr
    again = train(folder, "eagle3", tmp_path / "e", "--features", str(tmp_path / "f"))
    assert "all are there" in again.stderr


def test_recorded_turns_can_be_trained_on_without_generating(folder: Path, tmp_path: Path) -> None:
    given = arguments(folder, "dflash", tmp_path / "d", "--no-regenerate")
    at = given.index("--responses")
    result = CliRunner().invoke(main, given[:at] + given[at + 2 :])
    assert result.exit_code == 0, result.stderr
    assert "12 texts with" in result.stderr  # both turns of a trace in one
    assert "the recorded assistant turns" in (tmp_path / "d" / "README.md").read_text()
    assert not (tmp_path / "responses.jsonl").exists()


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("eagle3", ("--epochs", "0"), "--epochs=0.0: expected a number above 0"),
        ("eagle3", ("--held-out", "0.9"), "--held-out=0.9: expected a share from 0 to 0.5"),
        ("eagle3", ("--learning-rate", "0"), "--learning-rate=0.0: expected a rate above 0"),
        ("eagle3", ("--minutes", "0"), "--minutes=0.0: expected minutes above 0\n"),
        ("eagle3", ("--checkpoint-minutes", "-5"), "--checkpoint-minutes=-5.0: expected minutes"),
        ("eagle3", ("--texts-per-batch", "0"), "--texts-per-batch=0"),
        ("eagle3", ("--steps", "0"), "--steps=0"),
        ("eagle3", ("--draft-vocab", "100000"), "expected 1 to the target's"),
        ("eagle3", ("--draft-vocab", "0"), "--draft-vocab: a draft vocabulary of 0 tokens"),
        ("eagle3", ("--feature-layers", "0,9"), "--feature-layers=0,9: expected ascending"),
        ("eagle3", ("--feature-layers", "a,b"), "expected numbers with commas"),
        ("eagle3", ("--init", "./none"), "--init: there is no folder ./none"),
        ("dflash", ("--block-size", "1"), "--block-size=1"),
        ("dflash", ("--layers", "9"), "--layers=9: the target has 2 layers"),
        ("dflash", ("--layers", "9"), "(--no-warm-start)"),
        ("dflash", ("--mask-token", "-1"), "--mask-token=-1"),
        ("dflash", ("--anchors", "0"), "--anchors=0"),
        (
            "dflash",
            ("--init", "x", "--block-size", "4"),
            "--block-size cannot be given with --init='x'",
        ),
        ("dflash", ("--init", "x", "--warm-start"), "--warm-start cannot be given with --init"),
        (
            "dflash",
            ("--objective", "on-policy", "--features", "f"),
            "--features='f': the on-policy objective computes them itself",
        ),
        ("dflash", ("--mode", "continue", "--no-regenerate"), "--mode='continue' writes turns"),
        ("dflash", ("--no-regenerate",), "r.jsonl': with --no-regenerate recorded turns are"),
        ("dflash", ("--max-length", "5"), "24 turns left out, 24: longer than 5 tokens"),
        ("dflash", ("--limit", "1"), "--held-out=0.2: 1 trace cannot be trained on and held out"),
        ("dflash", ("--eagle3-depth", "5"), "No such option"),
        ("eagle3", ("--temperature", "-1"), "--temperature: -1.0"),
    ],
)
def test_what_cannot_be_is_one_error_and_leaves_nothing_behind(
    folder: Path, tmp_path: Path, kind: str, options: tuple[str, ...], told: str
) -> None:
    result = train(
        folder, kind, tmp_path / "out", "--responses", str(tmp_path / "r.jsonl"), *options
    )
    assert result.exit_code == 2
    assert told in result.stderr
    assert not (tmp_path / "out").exists()
    responses = tmp_path / "r.jsonl"
    assert not responses.exists() or responses.read_bytes().count(b"\n") == 1  # nothing generated


def test_what_is_in_the_output_is_nobody_elses(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.json").write_text("{}")
    for options in ((), ("--restart",)):
        result = train(folder, "eagle3", mine, *options)
        assert result.exit_code == 2
        assert "holds config.json, and no folder training/" in result.stderr
        assert "name a new or an empty folder" in result.stderr
    assert (mine / "config.json").read_text() == "{}"
    result = train(folder, "eagle3", mine / "config.json")
    assert "is a file; name a folder" in result.stderr
    result = train(folder, "eagle3", tmp_path / "none" / "e")
    assert f"there is no directory {tmp_path / 'none'}" in result.stderr


def test_a_drafter_without_its_checkpoints_is_told_as_what_it_is(
    folder: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    output = tmp_path / "e"
    shutil.copytree(trained["eagle3"], output)
    shutil.rmtree(output / "training")
    for options in ((), ("--restart",)):
        result = train(folder, "eagle3", output, *options)
        assert result.exit_code == 2
        assert "holds a drafter that whiflash-batch train wrote, but not its" in result.stderr
        assert "begin with it (--init" in result.stderr
    result = train(folder, "eagle3", tmp_path / "new", "--init", str(output), "--epochs", "0.1")
    assert result.exit_code == 0, result.stderr
    # Emptied it is still a folder of ours, also after a command that came to nothing.
    (output / "training").mkdir()
    assert train(folder, "eagle3", output, "--epochs", "0").exit_code == 2
    assert train(folder, "eagle3", output, "--init", "./none").exit_code == 2
    result = train(folder, "eagle3", output)
    assert result.exit_code == 0, result.stderr
    assert weights(output) == weights(trained["eagle3"])


def test_two_trainings_in_one_folder_are_one_too_many(folder: Path, tmp_path: Path) -> None:
    with TrainingFolder(tmp_path / "e").locked():
        result = train(folder, "eagle3", tmp_path / "e")
        assert result.exit_code == 2
        assert "another training is at work" in result.stderr


def test_traces_without_a_record_or_a_turn_are_told(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    questions = write_traces(tmp_path / "questions.jsonl", {"a": ["Only a question?"]})
    target = ("--target", str(folder / "target"), "--feature-layers", "0,1")
    for traces, told in ((empty, "no record found"), (questions, "there is no assistant turn")):
        output = tmp_path / "out"
        given = ["train", "eagle3", str(traces), "-o", str(output), *target]
        result = CliRunner().invoke(main, given)
        assert result.exit_code == 2
        assert told in result.stderr
        assert not output.exists()
