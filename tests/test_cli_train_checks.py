"""`whiflash-batch train`: what is wrong is told before the target answers, in the user's words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_folder
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from scripted import write_traces

from whiflash_agents import training_texts
from whiflash_agents.cli import main
from whiflash_agents.models import ModelFiles

TRACES = {f"t{n}": [f"Question {n}?", "Yes.", "And?", "No."] for n in range(6)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, another one, and traces with the first one's responses."""
    root = tmp_path_factory.mktemp("checks")
    tiny_folder.save(root / "target")
    weights = tiny_folder.save(root / "other") / "model.safetensors"
    changed = {name: tensor * 1.5 for name, tensor in load_file(weights).items()}
    save_file(changed, weights, metadata={"format": "pt"})
    write_traces(root / "traces.jsonl", TRACES)
    result = train(root, root / "begun", "--minutes", "1e-6")
    assert result.exit_code == 1, result.stderr
    return root


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The models that sessions were built of, to generate."""
    found: list[Path] = []
    build = training_texts._spec

    def counted(settings: Any, model: ModelFiles, concurrency: int) -> Any:
        found.append(model.path)
        return build(settings, model, concurrency)

    monkeypatch.setattr(training_texts, "_spec", counted)
    return found


def train(
    folder: Path,
    output: Path,
    *options: str,
    kind: str = "eagle3",
    traces: Path | None = None,
    responses: Path | None = None,
    environment: dict[str, str] | None = None,
    typed: str | None = None,
) -> Result:
    given = ["train", kind, str(traces or folder / "traces.jsonl"), "-o", str(output)]
    given += ["--target", str(folder / "target"), "--max-tokens", "6", "--held-out", "0.3"]
    if "--no-regenerate" not in options:
        given += ["--responses", str(responses or folder / "responses.jsonl")]
    given += ["--feature-layers", "0,1" if kind == "eagle3" else "1,2", "--epochs", "1"]
    if kind == "dflash":
        given += ["--layers", "2"]
    return CliRunner().invoke(main, [*given, *options], env=environment, input=typed)


# Before anything is generated --------------------------------------------------------------------


def test_a_trace_that_can_not_be_split_is_refused_before_a_model_is_loaded(
    folder: Path, tmp_path: Path, asked: list[Path]
) -> None:
    mixed = write_traces(tmp_path / "m.jsonl", {"a": ["Hm?", "Yes."], "b": ["No turn here?"]})
    for traces, options in ((None, ("--limit", "1")), (mixed, ())):
        result = train(
            folder, tmp_path / "d", *options, "--target", "./none", kind="dflash", traces=traces
        )
        assert result.exit_code == 2
        assert "--held-out=0.3: 1 trace cannot be trained on and held out, too" in result.stderr
        assert "hold nothing out (--held-out 0)" in result.stderr
    assert not (tmp_path / "d").exists()
    assert asked == []
    result = train(folder, tmp_path / "d", "--limit", "1", "--held-out", "0")
    assert result.exit_code == 0, result.stderr


def test_a_trace_that_is_left_with_no_other_is_refused_with_the_reason(
    folder: Path, tmp_path: Path, asked: list[Path]
) -> None:
    long = {"a": ["Hm?", "Yes."], "b": ["word " * 60, "No."]}
    traces = write_traces(tmp_path / "t.jsonl", long)
    result = train(
        folder, tmp_path / "d", "--max-length", "100", traces=traces, responses=tmp_path / "r.jsonl"
    )
    assert result.exit_code == 2
    assert "1 turn left out: longer than 100 tokens" in result.stderr
    assert "1 trace cannot be trained on and held out" in result.stderr
    assert asked == []


def test_features_of_another_target_are_refused_before_its_answers_are_asked_for(
    folder: Path, tmp_path: Path, asked: list[Path]
) -> None:
    features = ("--features", str(tmp_path / "f"))
    assert train(folder, tmp_path / "d", *features).exit_code == 0
    given = ("--target", str(folder / "other"), *features)
    result = train(folder, tmp_path / "e", *given, responses=tmp_path / "r.jsonl")
    assert result.exit_code == 2
    assert "holds features of something else" in result.stderr
    assert "the target's config or weights: another" in result.stderr
    assert "name another folder (--features)" in result.stderr
    assert asked == []
    assert not (tmp_path / "r.jsonl").exists()


def test_traces_that_came_since_training_began_are_refused_before_they_are_answered(
    folder: Path, tmp_path: Path, asked: list[Path]
) -> None:
    kept = (folder / "responses.jsonl").read_bytes()
    more = write_traces(tmp_path / "more.jsonl", TRACES | {"new": ["What else?", "That."]})
    result = train(folder, folder / "begun", traces=more)
    assert result.exit_code == 2
    assert "was begun with something else" in result.stderr
    assert "(the turns that texts are made of: " in result.stderr
    assert "go on with what it was begun with, or begin anew (--restart)" in result.stderr
    assert asked == []
    assert (folder / "responses.jsonl").read_bytes() == kept


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--learning-rate", "0.5"), "(--learning-rate: 0.001, now 0.5)"),
        (("--max-tokens", "7"), "(--max-tokens: 6, now 7)"),
        (("--feature-layers", "1"), "(--feature-layers: 0,1, now 1)"),
        (("--seed", "3"), "(--seed: 0, now 3)"),
        (("--target", "other"), "(the target (--target, --adapter, --dtype): another)"),
    ],
)
def test_what_differs_is_told_before_answers_are_asked_for_anew(
    folder: Path, tmp_path: Path, asked: list[Path], options: tuple[str, str], told: str
) -> None:
    if options[0] == "--target":
        options = ("--target", str(folder / "other"))
    result = train(folder, folder / "begun", *options, responses=tmp_path / "r.jsonl")
    assert result.exit_code == 2
    assert told in result.stderr
    assert asked == []


def test_a_trace_that_was_changed_is_told_before_those_ahead_of_it_are_answered(
    folder: Path, tmp_path: Path, asked: list[Path]
) -> None:
    changed = {"new": ["What else?", "That."]} | TRACES | {"t5": ["Another?", "Yes."]}
    traces = write_traces(tmp_path / "t.jsonl", changed)
    result = train(folder, tmp_path / "d", traces=traces)
    assert result.exit_code == 2
    assert "holds a response to another prompt under the id 't5#0'" in result.stderr
    assert asked == []


def test_answers_that_were_lost_are_asked_for_again_and_training_goes_on(
    folder: Path, tmp_path: Path, asked: list[Path]
) -> None:
    assert train(folder, tmp_path / "d", "--minutes", "1e-6").exit_code == 1
    assert asked == []  # all were there
    result = train(folder, tmp_path / "d", responses=tmp_path / "r.jsonl")
    assert result.exit_code == 0, result.stderr
    assert len(asked) == 1
    assert (tmp_path / "r.jsonl").read_bytes() == (folder / "responses.jsonl").read_bytes()


def test_recorded_turns_that_changed_are_refused_until_training_is_begun_anew(
    folder: Path, tmp_path: Path
) -> None:
    def sitting(*options: str, traces: Path | None = None) -> Result:
        given = ("--no-regenerate", "--texts-per-batch", "1", *options)
        return train(folder, tmp_path / "d", *given, kind="dflash", traces=traces)

    assert sitting("--minutes", "1e-6").exit_code == 1
    changed = write_traces(tmp_path / "t.jsonl", TRACES | {"t5": ["Question 5?", "Perhaps."]})
    result = sitting(traces=changed)
    assert result.exit_code == 2
    assert "(the texts: as many, but others)" in result.stderr
    result = sitting("--restart", "--minutes", "1e-6", traces=changed)
    assert "the same command without --restart goes on" in result.stderr
    result = sitting(traces=changed)
    assert result.exit_code == 0, result.stderr


# What is told ------------------------------------------------------------------------------------


def test_a_vocabulary_that_has_little_of_the_answers_is_warned_of(
    folder: Path, tmp_path: Path
) -> None:
    small = train(folder, tmp_path / "d", "--draft-vocab", "8")
    assert small.exit_code == 0, small.stderr
    assert "warning: no draft gets past a token that the draft vocabulary lacks" in small.stderr
    assert "give more tokens (--draft-vocab)" in small.stderr
    (line,) = [x for x in small.stderr.splitlines() if "the draft vocabulary has" in x]
    share = line.partition("has ")[2].partition(" of the response")[0]
    card = (tmp_path / "d" / "README.md").read_text()
    assert f"| of those trained on, in the draft vocabulary | {share} |" in card
    large = train(folder, tmp_path / "e", "--draft-vocab", "90")
    assert large.exit_code == 0, large.stderr
    assert "the draft vocabulary has 100.0 % of the response tokens" in large.stderr
    assert "warning" not in large.stderr
    further = train(folder, tmp_path / "f", "--init", str(tmp_path / "d"))
    assert further.exit_code == 2  # these sizes are its own
    assert "--feature-layers cannot be given with --init=" in further.stderr


def test_the_card_tells_of_settings_from_elsewhere_and_of_one_as_one(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text("[sampling]\ntemperature = 0.5\nmin_tokens = 2\n")
    traces = write_traces(tmp_path / "t.jsonl", {"a": ["Hm?", "Yes."]})
    options = ("--config", str(tmp_path / "run.toml"), "--held-out", "0", "--texts-per-batch", "1")
    result = train(
        folder,
        tmp_path / "d",
        *options,
        traces=Path("-"),
        responses=tmp_path / "r.jsonl",
        environment={"WHIFLASH_MODE": "continue"},
        typed=traces.read_text(),
    )
    assert result.exit_code == 0, result.stderr
    assert "training on 1 text, 0 held out" in result.stderr
    assert "1 text with " in result.stderr
    card = (tmp_path / "d" / "README.md").read_text()
    for wanted in (
        "--mode continue",
        "--min-tokens 2 --temperature 0.5",
        "- traces: standard input: 1 trace\n",
        "- responses (mode continue): the turn that the target writes behind each of them, at "
        "temperature 0.5, min tokens 2, at most 6 tokens each",
        "1 epoch of 1 text per step",
    ):
        assert wanted in card


def test_a_mode_of_the_environment_is_told_as_what_it_is(folder: Path, tmp_path: Path) -> None:
    environment = {"WHIFLASH_MODE": "continue"}
    result = train(folder, tmp_path / "d", "--no-regenerate", environment=environment)
    assert result.exit_code == 2
    assert "environment variable WHIFLASH_MODE: mode='continue' writes turns" in result.stderr
