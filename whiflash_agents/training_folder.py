"""The folder that a drafter is trained in: its public files, and beside them what goes on from.

FOLDER/config.json, model.safetensors, README.md    once it is trained
FOLDER/training/                                     for the next sitting: checkpoints, and what
                                                     they were begun with
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from whiflash_agents.engine.errors import OutputError
from whiflash_agents.wanted_turns import FILE as WANTED

TRAINED_BY = "Trained by whiflash-agents"  # by these words a model card is known again
_LOCK, _CARD = ".lock", "README.md"


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
            raise self._without_checkpoints()

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
            (self.path / _CARD).write_text(card, encoding="utf-8")
        except OSError as error:
            raise self._refused(error) from error

    def _drop_if_unused(self) -> None:
        """Where nothing was done, leave no folder that looks as if something had been."""
        if any(path.name not in (_LOCK, WANTED) for path in self.state.iterdir()):
            return
        if any(path != self.state for path in self.path.iterdir()):
            return  # a drafter whose checkpoints were removed is still one that was trained here
        shutil.rmtree(self.state, ignore_errors=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def _without_checkpoints(self) -> OutputError:
        """It holds something, and no folder of checkpoints."""
        if self._is_trained_here():
            return OutputError(
                f"output {self.path} holds a drafter that whiflash-batch train wrote, but not its "
                f"folder {self.state.name}/ with the checkpoints that training goes on from. To "
                "train anew, remove the folder, or name a new one; to train this drafter further, "
                "begin with it (--init; --dflash for a head) and name a new folder"
            )
        names = sorted(path.name for path in self.path.iterdir())
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return OutputError(
            f"output {self.path} holds {shown}, and no folder {self.state.name}/ of an earlier "
            "training; name a new or an empty folder"
        )

    def _is_trained_here(self) -> bool:
        try:
            card = (self.path / _CARD).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        return TRAINED_BY in card and (self.path / "config.json").is_file()

    def _refused(self, error: OSError) -> OutputError:
        return OutputError(f"output {self.path} cannot be written: {error.strerror or error}")
