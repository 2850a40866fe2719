"""`WhiFlashBatch`: from trace files to ordered rows, and what is kept when a run ends early."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedEngine, echo_session, session, write_traces

from whiflash_agents import models
from whiflash_agents.batch import LocalRunner, Row, SessionSpec, WhiFlashBatch, generated_part
from whiflash_agents.batch.figures import RunFigures
from whiflash_agents.engine.errors import (
    OutputError,
    SettingsError,
    TraceError,
    WhiFlashError,
    WorkerError,
)
from whiflash_agents.models import ModelFiles
from whiflash_agents.settings import Settings

TRACES = {
    "a": ["q1", "echo q1", "q2", "other"],
    "b": ["REFUSED", "x", "q3", "y"],
    "c": ["q4", "z"],
}
IDS = ["a#0", "a#1", "b#0", "b#1", "c#0"]


@pytest.fixture(autouse=True)
def resolved(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """No model is looked for; the list holds the names that were asked for."""
    asked: list[str | None] = []

    def resolve(name: str | None, adapter: str | None) -> ModelFiles:
        asked.append(name)
        return ModelFiles(Path("nowhere"), "scripted")

    monkeypatch.setattr(models, "resolve_model", resolve)
    return asked


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    return write_traces(tmp_path / "traces.jsonl", TRACES)


def batch(
    engine: Callable[[], ScriptedEngine] | None = None, progress: Any = None, **settings: Any
) -> WhiFlashBatch:
    def load(spec: SessionSpec) -> Any:
        return echo_session(spec) if engine is None else session(engine())

    def runner(spec: SessionSpec, settings: Settings) -> LocalRunner:
        return LocalRunner(spec, settings, load=load)

    values = {"workers": 0, "concurrency": 2, "max_tokens": 40, **settings}
    values = {"router": "lookup", **values}  # scripted: there are no drafters to find
    return WhiFlashBatch(Settings.of(**values), runner=runner, progress=progress)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def test_rows_are_written_in_input_order_with_failed_rows_in_their_places(
    traces: Path, tmp_path: Path
) -> None:
    output = tmp_path / "rows.jsonl"
    figures = batch().run([traces], output)
    rows = lines(output)
    assert [row["custom_id"] for row in rows] == IDS
    assert [row["error"] is None for row in rows] == [True, True, False, False, True]
    assert (figures.ok, figures.failed) == (3, 2)
    assert figures.errors == {"RequestError": 2}


def test_run_and_rows_give_the_same_whatever_the_concurrency(traces: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    batch(concurrency=1).run([traces], output)
    streamed = list(batch(concurrency=7).rows([traces]))
    assert list(map(generated_part, streamed)) == list(map(generated_part, lines(output)))


@pytest.mark.parametrize("kind", [str, Path])
def test_one_trace_file_may_be_named_without_a_list(
    kind: Callable[[Path], str | Path], traces: Path, tmp_path: Path
) -> None:
    output = tmp_path / "rows.jsonl"
    batch().run(kind(traces), output)
    assert [row["custom_id"] for row in lines(output)] == IDS
    assert [row["custom_id"] for row in batch().rows(kind(traces))] == IDS


def test_sharded_input_gives_the_same_rows(traces: Path, tmp_path: Path) -> None:
    whole = [generated_part(row) for row in batch(temperature=1.0).rows([traces])]
    parts = []
    for trace_id, contents in reversed(TRACES.items()):
        shard = write_traces(tmp_path / f"{trace_id}.jsonl", {trace_id: contents})
        parts += [generated_part(row) for row in batch(temperature=1.0).rows([shard])]
    assert sorted(parts, key=lambda row: row["custom_id"]) == whole


def test_continue_mode_writes_one_row_per_trace(traces: Path) -> None:
    rows = list(batch(mode="continue").rows([traces]))
    assert [row["custom_id"] for row in rows] == ["a#2", "b#2", "c#1"]
    assert rows[0]["whiflash"]["agreement"] is None


def test_settings_reach_session_and_rows(traces: Path, resolved: list[str | None]) -> None:
    seen: list[SessionSpec] = []

    def runner(spec: SessionSpec, settings: Settings) -> LocalRunner:
        seen.append(spec)
        return LocalRunner(spec, settings, load=echo_session)

    settings = Settings.of(
        workers=0,
        target="some/model",
        router="lookup",
        concurrency=3,
        device="cpu",
        dtype="float32",
        kv_tokens=100,
        prefill_chunk=9,
        recorded_drafts=False,
        rounds=True,
        limit=1,
        max_tokens=3,
    )
    rows = list(WhiFlashBatch(settings, runner=runner).rows([traces]))
    (spec,) = seen
    assert resolved == ["some/model"]
    assert (spec.name, spec.router, spec.concurrency) == ("scripted", "lookup", 3)
    assert (spec.device, spec.dtype, spec.kv_tokens) == ("cpu", "float32", 100)
    assert (spec.prefill_chunk, spec.recorded_drafts, spec.rounds) == (9, False, True)
    assert [row["custom_id"] for row in rows] == ["a#0", "a#1"]
    assert all(len(row["whiflash"]["token_ids"]) == 3 for row in rows)
    assert all(row["whiflash"]["rounds"] for row in rows)


def test_bad_input_is_told_before_a_model_is_looked_for(
    tmp_path: Path, resolved: list[str | None]
) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text('{"messages": 3}\n')
    output = tmp_path / "rows.jsonl"
    with pytest.raises(TraceError, match=r"traces\.jsonl:1: messages"):
        batch().run([path], output)
    assert resolved == []
    assert not output.exists()


@pytest.mark.parametrize("place", ["rows", "metrics"])
def test_bad_output_is_told_before_the_input_is_read(
    tmp_path: Path, traces: Path, place: str, resolved: list[str | None]
) -> None:
    places = {"rows": tmp_path / "rows.jsonl", "metrics": tmp_path / "metrics.json"}
    places[place] = traces
    with pytest.raises(OutputError, match=r"traces\.jsonl is the same file"):
        batch().run([traces], places["rows"], metrics=places["metrics"], overwrite=True)
    assert resolved == []
    assert len(lines(traces)) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["traces.jsonl"]


def test_metrics_on_standard_output_or_over_the_rows_are_refused(
    tmp_path: Path, traces: Path
) -> None:
    with pytest.raises(OutputError, match="name a file"):
        batch().run([traces], tmp_path / "rows.jsonl", metrics="-")
    with pytest.raises(OutputError, match="is the same file as"):
        batch().run([traces], tmp_path / "rows.jsonl", metrics=tmp_path / "rows.jsonl")


def test_model_that_does_not_load_leaves_no_output_and_keeps_an_old_one(
    tmp_path: Path, traces: Path
) -> None:
    def broken() -> ScriptedEngine:
        raise WhiFlashError("weights are missing")

    old = tmp_path / "old.jsonl"
    old.write_text("done\n")
    with pytest.raises(WhiFlashError, match="weights are missing"):
        batch(broken).run([traces], old, overwrite=True)
    assert old.read_text() == "done\n"
    new = tmp_path / "new.jsonl"
    with pytest.raises(WhiFlashError, match="weights are missing"):
        batch(broken).run([traces], new)
    assert not new.exists()


def test_settings_that_ask_for_workers_are_refused_without_a_pool() -> None:
    with pytest.raises(SettingsError, match=r"workers=1.*set workers to 0"):
        WhiFlashBatch(Settings.of())


def test_engine_failure_keeps_rows_that_finished_even_behind_a_gap(tmp_path: Path) -> None:
    traces = write_traces(
        tmp_path / "t.jsonl", {"slow": ["s", "S"], "b": ["q", "Q"], "c": ["CRASH", "x"]}
    )
    output, metrics = tmp_path / "rows.jsonl", tmp_path / "metrics.json"
    running = batch(lambda: ScriptedEngine(str, delays={"slow#0": 10**6}))
    with pytest.raises(WorkerError, match="the device is gone"):
        running.run([traces], output, metrics=metrics)
    assert [row["custom_id"] for row in lines(output)] == ["b#0"]
    assert json.loads(metrics.read_text())["rows"]["ok"] == 1


class StopAfter:
    """A progress listener that ends the run once so many rows are done."""

    def __init__(self, rows: int, how: Callable[[], None]) -> None:
        self.rows, self.how = rows, how

    def phase(self, text: str) -> None:
        pass

    def update(self, figures: RunFigures) -> None:
        if figures.ok + figures.failed >= self.rows:
            self.how()

    def close(self) -> None:
        pass


def test_stop_keeps_what_is_finished_and_ends(traces: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    progress = StopAfter(1, lambda: running.stop())
    running = batch(progress=progress, concurrency=1)
    figures = running.run([traces], output)
    assert figures.interrupted
    assert [row["custom_id"] for row in lines(output)] == ["a#0"]
    assert figures.ok == 1


def test_stop_request_of_a_run_does_not_stop_the_next_one(traces: Path, tmp_path: Path) -> None:
    running = batch(progress=StopAfter(1, lambda: running.stop()), concurrency=1)
    assert running.run([traces], tmp_path / "one.jsonl").interrupted
    running._progress = StopAfter(10**6, lambda: None)
    assert not running.run([traces], tmp_path / "two.jsonl").interrupted
    assert len(lines(tmp_path / "two.jsonl")) == 5


def test_keyboard_interrupt_while_decoding_keeps_finished_rows(
    traces: Path, tmp_path: Path
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    output = tmp_path / "rows.jsonl"
    running = batch(progress=StopAfter(1, interrupt), concurrency=1)
    with pytest.raises(KeyboardInterrupt):
        running.run([traces], output)
    assert [row["custom_id"] for row in lines(output)] == ["a#0"]


def test_input_without_turns_loads_no_model_and_leaves_an_empty_output(
    tmp_path: Path, resolved: list[str | None]
) -> None:
    traces = write_traces(tmp_path / "t.jsonl", {"a": ["only a question"]})
    figures = batch().run([traces], tmp_path / "rows.jsonl", metrics=tmp_path / "m.json")
    assert resolved == []
    assert (tmp_path / "rows.jsonl").read_bytes() == b""
    assert figures.input.traces_without_turns == 1
    assert json.loads((tmp_path / "m.json").read_text())["rows"]["planned"] == 0


def test_figures_add_up_over_rows(traces: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.json"
    output = tmp_path / "rows.jsonl"
    batch(max_tokens=7).run([traces], output, metrics=metrics)
    figures = json.loads(metrics.read_text())
    rows = [row for row in lines(output) if row["error"] is None]
    usage = [row["response"]["body"]["usage"] for row in rows]
    assert figures["tokens"]["generated"] == sum(u["completion_tokens"] for u in usage)
    assert figures["tokens"]["prompt"] == sum(u["prompt_tokens"] for u in usage)
    assert figures["tokens"]["cached"] == 3
    assert figures["rows"] == {
        "planned": 5,
        "ok": 3,
        "failed": 2,
        "with_notes": 0,
        "errors": {"RequestError": 2},
        "finish_reasons": {"length": 3},
    }
    stats = [row["whiflash"]["speculative_decoding"] for row in rows]
    pooled = figures["speculative_decoding"]
    steps = sum(s["num_spec_steps"] for s in stats)
    accepted = sum(s["num_accepted_draft_tokens"] for s in stats)
    assert pooled["num_spec_steps"] == sum(pooled["acceptance_histogram"]) == steps
    assert pooled["mean_acceptance_length"] == 1 + accepted / steps
    assert pooled["by_drafter"]["lookup"]["num_spec_steps"] == steps
    assert pooled["by_span"]["content"]["tokens"] == figures["tokens"]["generated"]
    assert figures["agreement"]["text"] == {"equal": 1, "compared": 3}
    assert figures["agreement"]["tool_name"] == {"equal": 0, "compared": 0}
    assert figures["settings"]["sampling"]["max_tokens"] == 7
    assert figures["engines"][0]["engine"]["output_tokens"] == figures["tokens"]["generated"]
    assert figures["interrupted"] is False


def test_pooled_switch_overhead_is_weighted_by_round_time() -> None:
    figures = RunFigures()
    (row,) = session_row()
    for overhead, seconds in ((0.5, 1.0), (0.0, 3.0)):
        row["whiflash"]["speculative_decoding"]["switch_overhead"] = overhead
        row["whiflash"]["round_seconds"] = seconds
        figures.add(row)
    assert figures.as_dict()["speculative_decoding"]["switch_overhead"] == 0.125


def session_row() -> list[dict[str, Any]]:
    running = session(ScriptedEngine(str))
    messages = [{"role": "user", "content": "q"}]
    running.submit(Row("a#0", "a", 0, messages, [], None, 0, {"max_tokens": 3}))
    return running.advance(60)


def test_rows_in_flight_and_waiting_stay_bounded_over_many_traces(tmp_path: Path) -> None:
    traces = write_traces(tmp_path / "t.jsonl", {f"t{n}": ["q", "a"] for n in range(300)})
    held: list[int] = []

    class Watched(LocalRunner):
        def results(self, timeout: float) -> list[dict[str, Any]]:
            held.append(self._open.pending)
            return super().results(timeout)

    settings = Settings.of(workers=0, concurrency=2, router="lookup")
    runner = WhiFlashBatch(
        settings, runner=lambda spec, settings: Watched(spec, settings, load=echo_session)
    )
    assert sum(1 for _ in runner.rows([traces])) == 300
    assert max(held) == 4
