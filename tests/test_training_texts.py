"""Texts to train drafters on: the target's own answers, kept as they come, or recorded turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_folder
from scripted import write_traces

from whiflash_agents import training_texts
from whiflash_agents.batch.progress import SilentProgress
from whiflash_agents.batch.session import EngineSession
from whiflash_agents.batch.session_spec import Models, SessionSpec
from whiflash_agents.engine.errors import (
    ChangedError,
    OutputError,
    SettingsError,
    TraceError,
    WorkerError,
)
from whiflash_agents.engine.training.texts import TrainingText
from whiflash_agents.models import resolve_model
from whiflash_agents.response_file import Response, ResponseFile
from whiflash_agents.settings import Settings
from whiflash_agents.training_texts import (
    TextSet,
    check_texts,
    recorded_texts,
    regenerated_texts,
    trace_of,
)
from whiflash_agents.wanted_turns import WantedTurns

TRACES = {"a": ["What is up?", "Much.", "And now?", "Little."], "b": ["Hello!", "Hi."]}
IDS = ["a#0", "a#1", "b#0"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.save(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def models(target: Path) -> Models:
    return Models.load(SessionSpec.of(settings_of(target), resolve_model(str(target))))


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    return write_traces(tmp_path / "traces.jsonl", TRACES)


def settings_of(target: Path, **changes: Any) -> Settings:
    return Settings.of(**({"target": str(target), "workers": 0, "max_tokens": 12} | changes))


def regenerate(
    target: Path, models: Models, traces: Path, path: Path, **changes: Any
) -> training_texts.TextSet:
    options = {k: changes.pop(k) for k in ("concurrency", "max_length", "check") if k in changes}
    return regenerated_texts(
        [traces],
        settings_of(target, **changes),
        models,
        resolve_model(str(target)),
        path,
        progress=SilentProgress(),
        **options,
    )


# The target's own answers ------------------------------------------------------------------------


def test_every_turn_becomes_a_text_of_its_prompt_and_the_targets_answer(
    target: Path, models: Models, traces: Path, tmp_path: Path
) -> None:
    found = regenerate(target, models, traces, tmp_path / "r.jsonl")
    assert [text.id for text in found.texts] == IDS
    assert found.generated == 3
    assert found.seconds > 0
    assert not found.left_out
    assert [trace_of(text) for text in found.texts] == ["a", "a", "b"]
    for text in found.texts:
        ((start, end),) = text.responses
        assert 1 <= end - start <= 12
        assert end == len(text.token_ids)
        prompt = models.chat.decode(text.token_ids[:start])
        assert prompt.endswith("<|im_start|>assistant\n")
    assert "Much." in models.chat.decode(found.texts[1].token_ids)  # history is as recorded


def test_answers_are_those_of_a_run(
    target: Path, models: Models, traces: Path, tmp_path: Path
) -> None:
    from whiflash_agents.batch import WhiFlashBatch

    for changes in ({}, {"temperature": 0.8, "seed": 5}):
        found = regenerate(target, models, traces, tmp_path / f"r{len(changes)}.jsonl", **changes)
        run = WhiFlashBatch(settings_of(target, router="none", **changes))
        rows = {row["custom_id"]: row["whiflash"]["token_ids"] for row in run.rows([traces])}
        answers = {text.id: list(text.token_ids[text.responses[0][0] :]) for text in found.texts}
        assert answers == rows


def test_what_is_there_is_not_generated_again_and_texts_are_the_same(
    target: Path, models: Models, traces: Path, tmp_path: Path
) -> None:
    path = tmp_path / "r.jsonl"
    first = regenerate(target, models, traces, path)
    kept = path.read_bytes()
    again = regenerate(target, models, traces, path, concurrency=1)
    assert again.generated == 0
    assert again.texts == first.texts
    assert path.read_bytes() == kept
    # Fewer traces need fewer texts; what else the file holds is left alone.
    assert [t.id for t in regenerate(target, models, traces, path, limit=1).texts] == IDS[:2]


def test_answers_are_kept_one_by_one_and_a_broken_off_run_goes_on(
    target: Path, models: Models, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = regenerate(target, models, traces, tmp_path / "whole.jsonl")
    path, advance = tmp_path / "r.jsonl", EngineSession.advance
    finished: list[str] = []

    def breaking(self: EngineSession, seconds: float) -> list[dict[str, Any]]:
        if finished:
            raise WorkerError("the machine is gone")
        found = advance(self, seconds)
        finished.extend(output["custom_id"] for output in found)
        return found

    monkeypatch.setattr(EngineSession, "advance", breaking)
    with pytest.raises(WorkerError):
        regenerate(target, models, traces, path, concurrency=1)
    monkeypatch.undo()
    assert len(finished) == 1
    assert len(path.read_bytes().splitlines()) == 2
    again = regenerate(target, models, traces, path)
    assert again.generated == 2
    assert again.texts == whole.texts


def test_a_torn_last_line_is_generated_again(
    target: Path, models: Models, traces: Path, tmp_path: Path
) -> None:
    path = tmp_path / "r.jsonl"
    whole = regenerate(target, models, traces, path)
    for cut in (1, 30):
        path.write_bytes(path.read_bytes()[:-cut])
        again = regenerate(target, models, traces, path)
        assert again.generated == 1
        assert again.texts == whole.texts
        assert len(path.read_bytes().splitlines()) == 4
    path.write_bytes(path.read_bytes()[:20])  # not even the first line is whole
    assert regenerate(target, models, traces, path).generated == 3


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"temperature": 0.5}, "temperature: 0.0, now 0.5"),
        ({"max_tokens": 13}, "max_tokens: 12, now 13"),
        ({"seed": 3}, "seed: 0, now 3"),
    ],
)
def test_answers_of_other_settings_are_refused(
    target: Path, models: Models, traces: Path, tmp_path: Path, changes: dict, told: str
) -> None:
    path = tmp_path / "r.jsonl"
    regenerate(target, models, traces, path)
    kept = path.read_bytes()
    with pytest.raises(SettingsError, match=told) as error:
        regenerate(target, models, traces, path, **changes)
    assert "--responses" in str(error.value)
    assert path.read_bytes() == kept
    # Neither of these has an effect on what is generated.
    regenerate(target, models, traces, path, concurrency=2, logprobs=True)


def test_an_answer_to_another_prompt_is_not_used(
    target: Path, models: Models, traces: Path, tmp_path: Path
) -> None:
    path = tmp_path / "r.jsonl"
    regenerate(target, models, traces, path)
    other = write_traces(tmp_path / "other.jsonl", {"a": ["Something else?", "No."]})
    with pytest.raises(SettingsError, match=r"another prompt under the id 'a#0'"):
        regenerate(target, models, other, path)


def test_what_cannot_be_generated_is_counted_and_tried_again_next_time(
    target: Path, models: Models, tmp_path: Path
) -> None:
    long = "word " * 1100
    traces = write_traces(tmp_path / "t.jsonl", {"a": [long, "x"], "b": ["Hello!", "Hi."]})
    path = tmp_path / "r.jsonl"
    for _ in range(2):
        found = regenerate(target, models, traces, path)
        assert [text.id for text in found.texts] == ["b#0"]
        ((reason, count),) = found.left_out.items()
        assert count == 1
        assert reason.startswith("ContextLengthError: the prompt of a#0")


def test_texts_that_would_be_too_long_are_left_out_before_they_are_generated(
    target: Path, models: Models, traces: Path, tmp_path: Path
) -> None:
    whole = regenerate(target, models, traces, tmp_path / "r.jsonl")
    sizes = {text.id: text.responses[0] for text in whole.texts}
    longest = sizes["a#1"][0]  # its prompt alone is too long then
    found = regenerate(target, models, traces, tmp_path / "s.jsonl", max_length=longest)
    assert "a#1" not in {text.id for text in found.texts}
    assert found.left_out[f"longer than {longest} tokens"] >= 1
    assert b'"a#1"' not in (tmp_path / "s.jsonl").read_bytes()
    reused = regenerate(target, models, traces, tmp_path / "r.jsonl", max_length=longest)
    assert reused.texts == found.texts
    assert reused.generated == 0


def test_what_is_wanted_is_told_before_it_is_generated_and_can_be_refused(
    target: Path, models: Models, traces: Path, tmp_path: Path
) -> None:
    path = tmp_path / "r.jsonl"
    regenerate(target, models, traces, path, limit=1)
    kept = path.read_bytes()
    told: list[WantedTurns] = []

    def refuse(wanted: WantedTurns) -> None:
        told.append(wanted)
        raise SettingsError("not these")

    for _ in range(2):
        with pytest.raises(SettingsError, match="not these"):
            regenerate(target, models, traces, path, check=refuse)
    assert path.read_bytes() == kept
    first, again = told
    assert list(first.prompts) == IDS
    assert first.missing == {"b#0"}
    assert first.traces() == ["a", "b"]
    assert again == first
    longest = regenerate(target, models, traces, path).texts[1].responses[0][0]
    for file in (path, tmp_path / "new.jsonl"):  # whether they are answered or not
        with pytest.raises(SettingsError, match="not these"):
            regenerate(target, models, traces, file, check=refuse, max_length=longest)
        assert list(told[-1].prompts) == ["a#0", "b#0"]


def test_turns_that_training_was_begun_with_are_told_from_others(tmp_path: Path) -> None:
    def wanted(*prompts: int, limit: int = 5, missing: bool = False) -> WantedTurns:
        turns = WantedTurns({"max_tokens": limit})
        for number, prompt in enumerate(prompts):
            turns.add(f"t{number}#0", (1, prompt), missing=missing)
        return turns

    wanted(1, 2, 3).check(tmp_path, {"t0"})  # there is nothing to compare with
    wanted(1, 2, 3).keep(tmp_path, {"t0"})
    wanted(1, 2, 3, missing=True).check(tmp_path, {"t0"})
    wanted(9, 2, 3).check(tmp_path, {"t0"})  # a trace that is held out is not trained on
    for other, held_out, told in (
        (wanted(1, 2, 4), {"t0"}, r"turns\.fingerprint"),
        (wanted(1, 2, 3, 4), {"t0"}, r"turns\.count: 2, now 3"),
        (wanted(1, 2, 3), set(), r"turns\.count: 2, now 3"),
        (wanted(1, 2, 3, limit=6), {"t0"}, "max_tokens: 5, now 6"),
    ):
        with pytest.raises(ChangedError, match=told):
            other.check(tmp_path, held_out)
    (tmp_path / "wanted.json").write_text("torn")
    wanted(4).check(tmp_path, set())
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        wanted(4).keep(tmp_path / "file", set())


def test_the_next_turn_can_be_written_too(target: Path, models: Models, tmp_path: Path) -> None:
    traces = write_traces(tmp_path / "t.jsonl", {"a": ["Only a question?"]})
    found = regenerate(target, models, traces, tmp_path / "r.jsonl", mode="continue")
    assert [text.id for text in found.texts] == ["a#0"]


def test_a_damaged_line_names_its_place_and_somebodys_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with ResponseFile(path, {"a": 1}) as file:
        for name in ("x", "y"):
            file.add(Response(name, (1, 2), (3,), "stop"))
    with ResponseFile(path, {"a": 1}) as file:
        assert list(file.responses) == ["x", "y"]
        assert file.responses["x"] == Response("x", (1, 2), (3,), "stop")
        with pytest.raises(OutputError, match="being written by another run"):
            ResponseFile(path, {"a": 1})
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:-5], lines[2]]) + "\n")
    with pytest.raises(OutputError, match=r"r\.jsonl:2: no response"):
        ResponseFile(path, {"a": 1})
    for content in ("my notes", "my notes\n", '{"format": "other"}\n', "[1]\n"):
        path.write_text(content)
        with pytest.raises(OutputError, match="something else than responses"):
            ResponseFile(path, {"a": 1})
        assert path.read_text() == content
    path.write_text(json.dumps(json.loads(lines[0]) | {"version": 9}) + "\n")
    with pytest.raises(OutputError, match="version 9"):
        ResponseFile(path, {"a": 1})
    with pytest.raises(OutputError, match="create it first"):
        ResponseFile(tmp_path / "none" / "r.jsonl", {})


# Recorded turns ----------------------------------------------------------------------------------


def test_recorded_turns_of_a_trace_stand_in_one_text(
    target: Path, models: Models, traces: Path
) -> None:
    found = recorded_texts([traces], settings_of(target), models.chat)
    assert [text.id for text in found.texts] == ["a#0", "b#0"]
    first = found.texts[0]
    spoken = [models.chat.decode(first.token_ids[start:end]) for start, end in first.responses]
    assert spoken == ["Much.<|im_end|>", "Little.<|im_end|>"]
    for start, _ in first.responses:
        assert models.chat.decode(first.token_ids[:start]).endswith("<|im_start|>assistant\n")
    assert first.responses[-1][1] == len(first.token_ids)
    assert found.num_response_tokens == sum(text.num_response_tokens for text in found.texts)


def test_turns_stand_alone_where_the_template_rewrites_history(
    target: Path, models: Models, traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt_ids = type(models.chat).prompt_ids

    def numbered(self: Any, messages: Any, tools: Any = ()) -> list[int]:
        ids = prompt_ids(self, messages, tools)
        return [ids[len(messages)], *ids]  # begins otherwise for every turn

    monkeypatch.setattr(type(models.chat), "prompt_ids", numbered)
    found = recorded_texts([traces], settings_of(target), models.chat)
    assert [text.id for text in found.texts] == IDS


def test_recorded_turns_that_do_not_fit_or_cannot_be_written_are_counted(
    target: Path, models: Models, traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = recorded_texts([traces], settings_of(target), models.chat).texts
    limit = len(whole[0].token_ids) - 1
    found = recorded_texts([traces], settings_of(target), models.chat, max_length=limit)
    assert [len(text.responses) for text in found.texts] == [1, 1]
    assert found.left_out == {f"longer than {limit} tokens": 1}
    monkeypatch.setattr(type(models.chat), "turn_ids", lambda *_: [])
    found = recorded_texts([traces], settings_of(target), models.chat)
    assert found.left_out == {"the chat template cannot write the recorded turn": 3}
    with pytest.raises(TraceError, match="of 3 turns left out, 3: the chat template"):
        check_texts(found)


def test_there_is_nothing_recorded_to_continue_with(
    target: Path, models: Models, traces: Path
) -> None:
    with pytest.raises(SettingsError, match="mode='continue'"):
        recorded_texts([traces], settings_of(target, mode="continue"), models.chat)


def test_a_set_without_texts_is_refused() -> None:
    check_texts(TextSet([TrainingText("a#0", (1, 2), ((1, 2),))]))
    with pytest.raises(TraceError, match="there is no assistant turn"):
        check_texts(TextSet())
