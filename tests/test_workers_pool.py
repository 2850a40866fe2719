"""The Ray pool: same rows as in process, and an end with a reason when an actor fails."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import scripted
from scripted import echo_session, spec, write_traces

from whiflash_agents import models
from whiflash_agents.batch import LocalRunner, Row, WhiFlashBatch, generated_part
from whiflash_agents.batch.session import EngineSession
from whiflash_agents.batch.session_spec import SessionSpec
from whiflash_agents.engine.errors import CheckpointError, SettingsError, WorkerError
from whiflash_agents.models import ModelFiles
from whiflash_agents.settings import Settings
from whiflash_agents.workers import local_ray
from whiflash_agents.workers.local_ray import available_cpus, gpus_per_worker, ray
from whiflash_agents.workers.pool import EnginePool


@pytest.fixture(scope="module", autouse=True)
def ray_session() -> Iterator[None]:
    """One Ray session for all tests here; actors get this module and its script by value."""
    for module in (scripted, sys.modules[__name__]):
        ray.cloudpickle.register_pickle_by_value(module)
    assert local_ray.start_ray(2)
    yield
    ray.shutdown()
    for module in (scripted, sys.modules[__name__]):
        ray.cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def pool() -> Iterator[Callable[..., EnginePool]]:
    made: list[EnginePool] = []

    def make(
        load: Callable[[SessionSpec], EngineSession] = echo_session, workers: int = 1
    ) -> EnginePool:
        made.append(EnginePool(spec(), Settings.of(workers=workers, concurrency=2), load=load))
        return made[-1]

    yield make
    for each in made:
        each.close()


def row(row_id: str, asked: str = "question") -> Row:
    trace_id, _, turn = row_id.partition("#")
    messages = [{"role": "user", "content": asked}]
    return Row(row_id, trace_id, int(turn), messages, [], None, 3, {"max_tokens": 50})


def collect(pool: EnginePool, count: int) -> dict[str, dict[str, Any]]:
    outputs: dict[str, dict[str, Any]] = {}
    while len(outputs) < count:
        for output in pool.results(10.0):
            outputs[output["custom_id"]] = output
    return outputs


def test_two_workers_give_the_rows_of_the_in_process_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        models, "resolve_model", lambda name, adapter: ModelFiles(Path("x"), "scripted")
    )
    traces = write_traces(
        tmp_path / "t.jsonl",
        {f"t{n}": ["one", "1", "REFUSED" if n == 2 else "two", "2"] for n in range(6)},
    )

    def rows(workers: int, runner: Any) -> list[dict[str, Any]]:
        settings = Settings.of(workers=workers, concurrency=2, router="lookup")
        running = WhiFlashBatch(
            settings, runner=lambda spec, settings: runner(spec, settings, load=echo_session)
        )
        done = list(running.rows([traces]))
        assert len(running.figures.engines) == max(1, workers)
        return [generated_part(row) for row in done]

    in_actors = rows(2, EnginePool)
    assert in_actors == rows(0, LocalRunner)
    assert [row["custom_id"] for row in in_actors][:3] == ["t0#0", "t0#1", "t1#0"]


def test_turns_of_a_trace_stay_with_one_worker_and_traces_are_shared_out(
    pool: Callable[..., EnginePool],
) -> None:
    def load(spec: SessionSpec) -> EngineSession:
        session = echo_session(spec)
        session._chat.parse = (  # type: ignore[method-assign]
            lambda prompt, ids, *, tools=(): scripted.Turn(content=str(os.getpid()))
        )
        return session

    pair = pool(load, workers=2)
    ids = [f"{trace}#{turn}" for turn in range(3) for trace in "abcd"]
    where: dict[str, str] = {}
    for row_id in ids:
        pair.submit(row(row_id))
    for row_id, output in collect(pair, len(ids)).items():
        where[row_id] = output["response"]["body"]["choices"][0]["message"]["content"]
    homes = {trace: {where[f"{trace}#{turn}"] for turn in range(3)} for trace in "abcd"}
    assert all(len(pids) == 1 for pids in homes.values())
    counts = [list(where.values()).count(pid) for pid in set(where.values())]
    assert counts == [6, 6]


def test_actor_gets_its_share_of_the_cpus(pool: Callable[..., EnginePool]) -> None:
    alone = pool()
    alone.submit(row("a#0"))
    collect(alone, 1)
    (description,) = alone.describe()
    assert description["threads"] == available_cpus()
    assert description["device"] == "cpu"


def test_error_of_loading_comes_through_as_itself(pool: Callable[..., EnginePool]) -> None:
    def load(spec: SessionSpec) -> EngineSession:
        raise CheckpointError("layer 3 is missing")

    with pytest.raises(CheckpointError, match="layer 3 is missing"):
        pool(load)


def test_actor_that_dies_while_loading_is_told_and_not_restarted(
    pool: Callable[..., EnginePool],
) -> None:
    def load(spec: SessionSpec) -> EngineSession:
        os._exit(1)

    with pytest.raises(WorkerError, match=r"worker 0 died: .*unexpectedly"):
        pool(load)


def test_actor_that_dies_while_decoding_ends_the_run_and_names_its_rows(
    pool: Callable[..., EnginePool],
) -> None:
    def load(spec: SessionSpec) -> EngineSession:
        def answer(asked: str) -> str:
            if asked == "DIE":
                os._exit(1)
            return asked

        session = echo_session(spec)
        session._engine._script = answer  # type: ignore[attr-defined]
        return session

    dying = pool(load)
    dying.submit(row("a#0", "fine"))
    collect(dying, 1)
    dying.submit(row("b#0", "DIE"))
    with pytest.raises(WorkerError, match=r"worker 0 died while it held b#0: .*unexpectedly"):
        collect(dying, 1)
    with pytest.raises(WorkerError):  # and it goes on saying so, rather than wait for ever
        dying.results(1.0)


def test_engine_failure_in_an_actor_names_row_and_cause(pool: Callable[..., EnginePool]) -> None:
    failing = pool()
    failing.submit(row("a#0", "CRASH"))
    with pytest.raises(WorkerError, match="a#0"):
        collect(failing, 2)


def test_results_without_time_starts_nothing(pool: Callable[..., EnginePool]) -> None:
    idle = pool()
    idle.submit(row("a#0"))
    assert idle.results(0) == []
    assert idle._workers[0].call is None


def test_gpus_are_taken_only_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_gpus(count: int) -> None:
        monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": float(count)})

    with_gpus(0)
    assert gpus_per_worker("auto", 2) == 0
    with pytest.raises(WorkerError, match="Ray knows of no GPU"):
        gpus_per_worker("cuda", 1)
    with_gpus(2)
    assert gpus_per_worker("auto", 2) == gpus_per_worker("cuda", 1) == 1
    assert gpus_per_worker("cpu", 1) == gpus_per_worker("mps", 1) == 0
    with pytest.raises(WorkerError, match="lower workers to 2"):
        gpus_per_worker("auto", 3)


def test_pool_refuses_settings_without_workers() -> None:
    with pytest.raises(SettingsError, match="workers=0"):
        EnginePool(spec(), Settings.of(workers=0))
