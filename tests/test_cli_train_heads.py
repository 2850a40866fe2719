"""`whiflash-batch train local-head|length-head`: from traces and a drafter to one with a head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import drafter_folder
import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from whiflash_agents.batch import LocalRunner, WhiFlashBatch
from whiflash_agents.cli import main
from whiflash_agents.doctor import examine
from whiflash_agents.settings import Settings

KINDS = ["local-head", "length-head"]
FILES = {"README.md", "config.json", "model.safetensors", "training"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafter_folder.save(tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, Path]:
    """One of each kind; the length head for the drafter with the local one."""
    output = {kind: folder / kind for kind in KINDS}
    for kind, drafter in (("local-head", folder / "dflash"), ("length-head", output["local-head"])):
        result = train(folder, kind, output[kind], drafter=drafter)
        assert result.exit_code == 0, result.stderr
        assert "dflash-plain" in result.stderr
        assert "DFlash with a" in result.stderr
    return output


def train(
    folder: Path, kind: str, output: Path, *options: str, drafter: Path | None = None
) -> Result:
    given = ["train", kind, str(folder / "traces.jsonl"), "-o", str(output)]
    given += ["--target", str(folder / "target"), "--dflash", str(drafter or folder / "dflash")]
    given += ["--responses", str(folder / "responses.jsonl"), "--max-tokens", "12"]
    given += ["--held-out", "0.4", "--epochs", "4", "--texts-per-batch", "1"]
    if kind == "local-head":
        given += ["--state-size", "8", "--rank", "4"]
    return CliRunner().invoke(main, [*given, *options])


def outputs(folder: Path, drafter: Path, **changes: object) -> list[list[int]]:
    settings = Settings.of(
        target=str(folder / "target"),
        router="dflash",
        dflash=str(drafter),
        workers=0,
        max_tokens=12,
        **changes,
    )
    run = WhiFlashBatch(settings, runner=LocalRunner)
    rows = list(run.rows([folder / "traces.jsonl"]))
    assert run.figures.by_drafter["dflash"].steps > 0
    return [row["whiflash"]["token_ids"] for row in rows]


def test_what_is_trained_is_the_drafter_with_its_head(
    folder: Path, trained: dict[str, Path]
) -> None:
    local, length = trained["local-head"], trained["length-head"]
    beside = {"local_head.json", "local_head.safetensors"}
    assert {path.name for path in local.iterdir()} == FILES | beside
    assert {path.name for path in length.iterdir()} == FILES | beside
    before = load_file(folder / "dflash" / "model.safetensors")
    for output in (local, length):
        after = load_file(output / "model.safetensors")
        assert all((after[name] == tensor).all() for name, tensor in before.items())
    assert set(load_file(local / "model.safetensors")) == set(before)
    assert json.loads((length / "config.json").read_text())["dflash_config"][
        "use_thresh_head_two_model"
    ]
    card = (length / "README.md").read_text()
    for wanted in (
        "# DFlash with a length head",
        "`local-head`",
        "held-out verification saved",
        "| all |",
        "- a local head, as it came with the drafter begun with: `local_head.json`",
        "- a length head, trained here: `model.safetensors`, with the drafter's weights",
        "- dflash: a block as a chain, with its local head and its length head",
        "- dflash-plain: the same without the length head",
    ):
        assert wanted in card
    card = (local / "README.md").read_text()
    assert "- a local head, trained here: `local_head.json` and `local_head.safetensors`" in card
    assert "a length head" not in card


def test_output_is_the_same_with_the_heads(folder: Path, trained: dict[str, Path]) -> None:
    for changes in ({}, {"temperature": 0.9}, {"verify_budget": "gain", "recalibrate": True}):
        wanted = outputs(folder, folder / "dflash", **changes)
        for drafter in trained.values():
            assert outputs(folder, drafter, **changes) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_time_that_is_up_is_status_1_and_the_same_command_goes_on(
    folder: Path, trained: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    drafter = folder / "dflash" if kind == "local-head" else trained["local-head"]
    statuses = []
    for _ in range(20):
        result = train(folder, kind, tmp_path / "d", "--minutes", "1e-6", drafter=drafter)
        statuses.append(result.exit_code)
        if result.exit_code == 0:
            break
    assert statuses == [1] * (len(statuses) - 1) + [0]
    assert len(statuses) > 1
    names = ("model.safetensors", "local_head.safetensors")
    for name in names:
        assert (tmp_path / "d" / name).read_bytes() == (trained[kind] / name).read_bytes()


def test_other_drafters_and_settings_are_refused_until_it_is_begun_anew(
    folder: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    output = tmp_path / "d"
    assert train(folder, "length-head", output, "--minutes", "1e-6").exit_code == 1
    for options, drafter, told in (
        (("--bottleneck", "12"), None, "(--bottleneck: 256, now 12)"),
        ((), trained["local-head"], "(--dflash: another drafter)"),
    ):
        result = train(folder, "length-head", output, *options, drafter=drafter)
        assert result.exit_code == 2
        assert told in result.stderr
    result = train(folder, "length-head", output, "--bottleneck", "12", "--restart")
    assert result.exit_code == 0, result.stderr
    head = load_file(output / "model.safetensors")["thresh_head_two_model.down.bias"]
    assert head.shape == (12,)


def test_drafters_that_no_head_can_be_trained_for_are_refused_before_anything(
    folder: Path, tmp_path: Path
) -> None:
    for kind in KINDS:
        result = train(folder, kind, tmp_path / "d", drafter=folder / "eagle3")
        assert result.exit_code == 2
        assert "holds an EAGLE-3 drafter" in result.stderr
        assert "name the folder of another drafter (--dflash)" in result.stderr
        result = train(folder, kind, tmp_path / "d", drafter=tmp_path / "none")
        assert result.exit_code == 2
        assert "--dflash" in result.stderr
        assert not (tmp_path / "d").exists()
    result = train(folder, "local-head", tmp_path / "d", "--weight", "-1")
    assert result.exit_code == 2
    assert "--weight=-1.0" in result.stderr


def test_doctor_tells_of_the_heads(folder: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    def told(drafter: Path) -> str:
        settings = Settings.of(target=str(folder / "target"), dflash=str(drafter))
        (text,) = [f.text for f in examine(settings) if (f.area, f.name) == ("drafters", "dflash")]
        return text

    assert " head" not in told(folder / "dflash")
    text = told(trained["length-head"])
    assert "local head beside it (rank 4, weights 0.3 and 0.3): corrects dflash, not ddtree" in text
    assert "AdaFlash length head: truncates what dflash verifies, not ddtree" in text
    shutil.copytree(trained["length-head"], tmp_path / "d")
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    config["dflash_config"]["thresh_head_direct_len"] = False
    (tmp_path / "d" / "config.json").write_text(json.dumps(config))
    assert "length head (6 tensors) is not used" in told(tmp_path / "d")


def test_a_drafter_that_is_trained_on_loses_the_heads_of_what_it_was(
    folder: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    given = ["train", "dflash", str(folder / "traces.jsonl"), "-o", str(tmp_path / "d")]
    given += ["--target", str(folder / "target"), "--init", str(trained["length-head"])]
    given += ["--responses", str(folder / "responses.jsonl"), "--max-tokens", "12"]
    result = CliRunner().invoke(main, [*given, "--held-out", "0", "--epochs", "1"])
    assert result.exit_code == 0, result.stderr
    assert {path.name for path in (tmp_path / "d").iterdir()} == FILES
    assert "thresh" not in (tmp_path / "d" / "config.json").read_text()
