"""The folder that a training writes to is never the one that it begins with."""

from __future__ import annotations

from pathlib import Path

import pytest

from whiflash_agents.engine.errors import OutputError
from whiflash_agents.training_folder import TrainingFolder


def test_the_drafter_that_training_begins_with_is_no_output(tmp_path: Path) -> None:
    (tmp_path / "d" / "training").mkdir(parents=True)  # as an earlier training leaves it
    with pytest.raises(OutputError, match="is the drafter that training begins with"):
        TrainingFolder(tmp_path / "d", str(tmp_path / "x" / ".." / "d"))
    TrainingFolder(tmp_path / "d", str(tmp_path / "other"))
    TrainingFolder(tmp_path / "d", "owner/name")
