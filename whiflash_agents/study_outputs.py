"""Where studies may write: checked before anything is read or loaded, as a run checks its output.

A study takes minutes or hours, and its inputs are dear: traces, models, drafters that were trained
for days, a router. None of them is ever overwritten, whatever `--overwrite` says.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from whiflash_agents.batch.writer import STDOUT, check_output
from whiflash_agents.engine.errors import OutputError
from whiflash_agents.models import find_local, find_local_drafter
from whiflash_agents.settings import NETWORK_NAMES, Settings


def used_files(
    settings: Settings, traces: Sequence[str | Path], config: str | Path | None = None
) -> list[Path]:
    """All files that a study reads: `traces`, the file of settings, a trained router, and those of
    target and drafters that are on this machine.

    Raises:
        ModelNotFoundError: the target is named by a folder that holds no model.
    """
    files = [Path(trace) for trace in traces if str(trace) != STDOUT]
    if config is not None:
        files.append(Path(config))
    for router in ("neural", "cost-aware"):
        if (weights := settings.router_weights(router)) is not None:
            files.append(Path(weights))
    for folder in _folders(settings):
        files += [file for file in folder.iterdir() if file.is_file()]
    return files


def _folders(settings: Settings) -> Iterator[Path]:
    """Folders of target and drafters, as far as they are on this machine."""
    target = find_local(settings.model.target)
    if target is not None:
        yield target
    for name in map(settings.drafter, NETWORK_NAMES):
        if name is not None and (drafter := find_local_drafter(name)) is not None:
            yield drafter


def check_file(
    place: str | Path, *, option: str, inputs: Sequence[str | Path], overwrite: bool
) -> Path:
    """Whether a file can be written at `place`, which will appear whole beside what is there.

    Args:
        option: what the user calls it.
        inputs: files that are never overwritten.

    Raises:
        OutputError: it is standard output, a folder, a device, an input, exists (without
            `overwrite`), or its folder is missing or cannot be written to.
    """
    path = Path(place)
    if str(place) == STDOUT:
        raise OutputError(f"{option} cannot go to standard output (-); name a file")
    check_output(path, option=option, inputs=inputs, overwrite=overwrite)
    if path.exists() and not path.is_file():
        raise OutputError(f"{option} {path} is no regular file; name another")
    _try_writing(path.parent, f"{option} {path}")
    return path


def check_folder(folder: Path, *, option: str) -> None:
    """Whether files can be written into `folder`.

    Raises:
        OutputError: it is missing, a file, or cannot be written to.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{option} {folder} is a file; name the folder to keep it in")
    if not folder.is_dir():
        raise OutputError(f"{option} {folder} is not there; create the folder first")
    _try_writing(folder, f"{option} {folder}")


def _try_writing(folder: Path, what: str) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".whiflash-"):
            return
    except OSError as error:
        raise OutputError(
            f"{what} cannot be written: {error.strerror} in {folder}; name another place"
        ) from None
