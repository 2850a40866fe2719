"""`--adapter`: the same weights everywhere, under a name of their own."""

from __future__ import annotations

import json
from pathlib import Path

import drafter_folder
import pytest
from click.testing import CliRunner, Result
from torch import nn
from transformers import AutoModelForCausalLM

from whiflash_agents.cli import main
from whiflash_agents.engine.adapter import merge_adapter, save_adapter
from whiflash_agents.engine.errors import CheckpointError, ModelNotFoundError
from whiflash_agents.engine.target import Target
from whiflash_agents.engine.training.adapter import LowRankAdapter
from whiflash_agents.models import resolve_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, an adapter that changes what it says, and the two merged."""
    root = drafter_folder.save(tmp_path_factory.mktemp("models"))
    model = AutoModelForCausalLM.from_pretrained(root / "target")
    adapter = LowRankAdapter(model, rank=2, alpha=4.0)
    for pair in adapter.pairs.values():
        nn.init.normal_(pair.b, std=0.3)  # type: ignore[arg-type]
    save_adapter(adapter.named_pairs(), adapter.alpha, root / "agent", base="target")
    merge_adapter(model, root / "agent")
    (root / "merged").mkdir()
    for file in (root / "target").iterdir():
        if not file.name.endswith(".safetensors"):
            (root / "merged" / file.name).write_bytes(file.read_bytes())
    model.save_pretrained(root / "merged")
    return root


def run(folder: Path, *arguments: str) -> list[dict]:
    fixed = ["run", str(folder / "traces.jsonl"), "-o", "-", "--workers", "0", "-q"]
    result = CliRunner().invoke(main, [*fixed, "--max-tokens", "12", *arguments])
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def tokens(rows: list[dict]) -> list[list[int]]:
    return [row["whiflash"]["token_ids"] for row in rows]


def test_a_run_generates_what_the_merged_model_does(folder: Path) -> None:
    adapted = run(folder, f"--target={folder / 'target'}", f"--adapter={folder / 'agent'}")
    merged = run(folder, f"--target={folder / 'merged'}")
    plain = run(folder, f"--target={folder / 'target'}")
    assert tokens(adapted) == tokens(merged) != tokens(plain)
    assert adapted[0]["response"]["body"]["model"] == "target+agent"


def test_transformers_generates_with_the_adapter_too(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    where = [f"--target={folder / 'target'}", f"--adapter={folder / 'agent'}"]
    options = ["-o", str(output), "--max-tokens", "8", "--no-oracle", "--peer", "transformers"]
    result: Result = CliRunner().invoke(
        main, ["bench", str(folder / "traces.jsonl"), *where, *options, "-q"]
    )
    assert result.exit_code == 0, result.stderr
    peer = json.loads(output.read_text())["peers"]["transformers"]["plain"]
    assert peer["rows_identical"] == peer["rows"] == 3


def test_an_adapter_that_is_not_there_or_does_not_fit_is_told(folder: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"--adapter.*no adapter_config\.json in .*eagle3"):
        resolve_model(str(folder / "target"), str(folder / "eagle3"))
    (folder / "broken").mkdir()
    (folder / "broken" / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter in .*broken cannot be read"):
        Target.load(folder / "target", dtype="float32", adapter=folder / "broken")
