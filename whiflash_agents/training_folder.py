"""The folder that a drafter is trained in: its public files, and beside them what goes on from.

FOLDER/config.json, model.safetensors, README.md    once it is trained
FOLDER/training/                                     checkpoints, for the next sitting
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from whiflash_agents.engine.errors import OutputError

_LOCK = ".lock"


class TrainingFolder:
    """A folder for one drafter.

    Args:
        path: new, empty, or of an earlier sitting.
        begun_with: name or folder of the drafter that training begins with, which stays as it is.

    Raises:
        OutputError: it holds something else, is the folder that training begins with, or cannot be.

    Attributes:
        state: folder of the checkpoints.
    """

    def __init__(self, path: Path, begun_with: str | None = None) -> None:
        if begun_with is not None and Path(begun_with).expanduser().resolve() == path.resolve():
            raise OutputError(
                f"output {path} is the drafter that training begins with, which stays as it is; "
                "name another folder"
            )
        self.path = path
        self.state = path / "training"
        if not path.exists():
            if not path.parent.is_dir():
                raise OutputError(
                    f"output {path} cannot be written: there is no directory {path.parent}; "
                    "create it first"
                )
        elif not path.is_dir():
            raise OutputError(f"output {path} is a file; name a folder for the drafter")
        elif any(path.iterdir()) and not self.state.is_dir():
            raise OutputError(
                f"output {path} holds something that no training here wrote; name a new folder"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others out: two sittings would write over each other's checkpoints.

        Raises:
            OutputError: somebody is in, or the folder cannot be written.
        """
        lock = FileLock(self.state / _LOCK)
        try:
            self.state.mkdir(parents=True, exist_ok=True)
            lock.acquire(blocking=False)
        except Timeout:
            raise OutputError(
                f"another training is at work in {self.path}; wait for it, or name another folder"
            ) from None
        except OSError as error:
            raise self._refused(error) from None
        try:
            yield
        finally:
            lock.release()
            self._drop_if_unused()

    def place(self, save: Callable[[Path], None]) -> None:
        """Let `save` write the drafter into a folder of its own, then move its files into place.

        Raises:
            OutputError: it cannot be written. What `save` raises.
        """
        fresh = self.state / "drafter"
        shutil.rmtree(fresh, ignore_errors=True)
        save(fresh)
        try:
            # The config comes last: who sees it sees the weights that belong to it.
            (self.path / "config.json").unlink(missing_ok=True)
            for file in sorted(fresh.iterdir(), key=lambda file: file.name == "config.json"):
                file.replace(self.path / file.name)
            shutil.rmtree(fresh)
        except OSError as error:
            raise self._refused(error) from error

    def write_card(self, card: str) -> None:
        """Write the model card, or another in its place.

        Raises:
            OutputError: it cannot be written.
        """
        try:
            (self.path / "README.md").write_text(card, encoding="utf-8")
        except OSError as error:
            raise self._refused(error) from error

    def _drop_if_unused(self) -> None:
        """Where nothing was done, leave no folder that looks as if something had been."""
        if any(path.name != _LOCK for path in self.state.iterdir()):
            return
        shutil.rmtree(self.state, ignore_errors=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def _refused(self, error: OSError) -> OutputError:
        return OutputError(f"output {self.path} cannot be written: {error.strerror or error}")
