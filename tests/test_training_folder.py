"""The folder that a training writes to is never the one that it begins with."""

from __future__ import annotations

from pathlib import Path

import pytest

from whiflash_agents.engine.errors import OutputError
from whiflash_agents.training_folder import TRAINED_BY, TrainingFolder


def test_the_drafter_that_training_begins_with_is_no_output(tmp_path: Path) -> None:
    (tmp_path / "d" / "training").mkdir(parents=True)  # as an earlier training leaves it
    with pytest.raises(OutputError, match="is the drafter that training begins with"):
        TrainingFolder(tmp_path / "d", str(tmp_path / "x" / ".." / "d"))
    TrainingFolder(tmp_path / "d", str(tmp_path / "other"))
    TrainingFolder(tmp_path / "d", "owner/name")


def test_what_is_in_a_folder_without_checkpoints_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    for name in ("a", "b", "c", "d", "e"):
        (folder / name).write_text("")
    with pytest.raises(OutputError, match="holds a, b, c and 2 more, and no folder training/"):
        TrainingFolder(folder)
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("# A model\n\nTrained by somebody.\n")
    with pytest.raises(OutputError, match="and no folder training/ of an earlier training"):
        TrainingFolder(folder)
    (folder / "README.md").write_text(f"# A model\n\n{TRAINED_BY} 0.1.\n")
    with pytest.raises(OutputError, match="holds a drafter that whiflash-batch train wrote"):
        TrainingFolder(folder)


def test_a_folder_in_which_nothing_was_done_is_gone_and_a_drafter_stays(tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path / "d")
    with folder.locked():
        (folder.state / "wanted.json").write_text("{}")
    assert not folder.path.exists()
    with folder.locked():
        (folder.path / "config.json").write_text("{}")
    with TrainingFolder(tmp_path / "d").locked():
        pass
    TrainingFolder(tmp_path / "d")
