"""The default agent: what comes with the package, and what it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whiflash_agents import cost_store
from whiflash_agents.batch.progress import SilentProgress
from whiflash_agents.bench import Bench
from whiflash_agents.embedded import default_agent
from whiflash_agents.engine.errors import ModelNotFoundError
from whiflash_agents.models import ModelFiles, resolve_model
from whiflash_agents.settings import ROUTERS, Settings

TRACES = Path(__file__).parent.parent / "examples" / "agent_traces.jsonl"  # held out
FOLDERS = ("adapter", "eagle3", "dflash")


@pytest.fixture(scope="session")
def agent() -> ModelFiles:
    try:
        return resolve_model(None)
    except ModelNotFoundError as error:
        pytest.skip(f"the default model is not here and cannot be fetched: {error}")


@pytest.fixture(scope="module")
def outcome(agent: ModelFiles) -> Any:
    """Two turns by every contender, in float32, and their figures."""
    settings = Settings.of(workers=0, limit=1, max_tokens=40, dtype="float32")
    bench = Bench(settings, progress=SilentProgress(), oracle=False)
    return bench.run([TRACES]), bench


def test_weights_are_safetensors_and_small_and_have_cards() -> None:
    files = [path for path in default_agent.folder().rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".md", ".safetensors"}
    assert sum(path.stat().st_size for path in files) < 60e6
    for name in FOLDERS:
        card = (default_agent.folder() / name / "README.md").read_text(encoding="utf-8")
        assert "## How it was made" in card or "whiflash-batch train" in card
    for router in ("neural", "cost-aware"):
        weights = default_agent.router_weights(router)
        assert weights is not None
        assert weights.is_file()


def test_routers_were_trained_for_the_weights_that_come_with_them(outcome: Any) -> None:
    from whiflash_agents.engine.routing.weights import models_of

    _, bench = outcome
    ours = {part: model.identity for part, model in bench.made_for().items()}
    for router in ("neural", "cost-aware"):
        weights = default_agent.router_weights(router)
        assert weights is not None
        assert {part: model.identity for part, model in models_of(weights).items()} == ours


def test_every_drafter_and_router_gives_the_same_turns(outcome: Any) -> None:
    figures, bench = outcome
    assert set(bench.contenders()) == set(ROUTERS)
    assert figures["outputs_identical"] is True
    assert figures["rows"] == 2


def test_its_drafters_know_how_it_writes(outcome: Any) -> None:
    figures, _ = outcome
    for arm in ("eagle3", "dflash", "ddtree"):
        assert figures["arms"][arm]["mean_acceptance_length"] > 2.0  # random ones have 1.0


def test_it_reasons_before_it_acts(outcome: Any) -> None:
    _, bench = outcome
    turns = [row.outputs["none"]["response"]["body"]["choices"][0] for row in bench.rows]
    assert all(turn["message"]["reasoning_content"] for turn in turns)


def test_a_run_without_options_is_routed(agent: ModelFiles) -> None:
    settings = Settings.of()
    assert settings.router == "cost-aware"
    for network in settings.networks:
        folder = Path(str(settings.drafter(network)))
        assert json.loads((folder / "config.json").read_text())["architectures"]


def test_cost_tables_are_whole_and_name_no_place_of_one_machine() -> None:
    tables = list(default_agent.costs().iterdir())
    assert tables
    for path in tables:
        key = json.loads(path.read_text())["key"]
        assert cost_store.path_of(key).name == path.name
        assert cost_store.load(path, key)[0] is not None
        places = {n: f"{default_agent.NAME}/{n}" for n in ("eagle3", "dflash")}
        assert key["more"] == {"drafters": places}
