"""Features on disk: computed once, read in every epoch.

One safetensors file for each text, named by its tokens, so that texts that are added later only add
files. Features take far more room than texts (tens of gigabytes are soon reached), so what is
missing is counted, and the room checked, before the first byte is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from ..errors import ChangedError, OutputError, SettingsError
from ..memory import size_text
from .feature_source import ComputedFeatures, TextFeatures
from .identity import changes, plain, target_fingerprint
from .texts import TrainingText

FORMAT = "whiflash-agents features"
VERSION = 1
MANIFEST = "features.json"
_HEADER = 512  # bytes of a file that are not tensors, rounded up
_SPARE = 0.02  # share of the disk that is left free


class CachedFeatures:
    """A feature source that keeps what `source` computes.

    Args:
        folder: where; new, empty, or of the same target, layers and dtype.

    Raises:
        ChangedError: the folder holds features of something else.
        OutputError: it cannot be read, or holds something that is no features.
    """

    def __init__(self, source: ComputedFeatures, folder: str | Path) -> None:
        self.source = source
        self.folder = Path(folder)
        self._identity = plain(
            {
                "format": FORMAT,
                "version": VERSION,
                "target": source.target.name,
                "fingerprint": target_fingerprint(source.target),
                "layers": source.layers,
                "dtype": str(source.target.dtype).removeprefix("torch."),
            }
        )
        self._check_folder()

    def estimate(self, texts: Iterable[TrainingText]) -> int:
        """Bytes that the features of `texts` will take beyond those that are there already."""
        target, width = self.source.target, len(self.source.layers) + 1
        each = width * target.hidden_size * target.dtype.itemsize + 8
        missing = {self._path(text): len(text.token_ids) for text in texts}
        return sum(n * each + _HEADER for path, n in missing.items() if not path.is_file())

    def check_room(self, texts: Iterable[TrainingText]) -> int:
        """The estimate for `texts`, if the disk has room for it.

        Raises:
            SettingsError: it has not.
        """
        needed = self.estimate(texts)
        place = self.folder.absolute()
        while not place.exists():
            place = place.parent
        usage = shutil.disk_usage(place)
        if needed > usage.free - int(_SPARE * usage.total):
            raise SettingsError(
                f"features of these texts take {size_text(needed)} in {self.folder}, where "
                f"{size_text(usage.free)} are free; compute them on the fly (--features computed), "
                "train on fewer texts (--limit), or name a folder on a larger disk"
            )
        return needed

    def __call__(self, text: TrainingText) -> TextFeatures:
        """Read the features of `text`, or compute and keep them.

        Raises:
            OutputError: they cannot be written.
            What `ComputedFeatures` raises.
        """
        path = self._path(text)
        found = self._read(path, text)
        if found is None:
            found = self.source(text)
            self._write(path, found)
        return found

    def _path(self, text: TrainingText) -> Path:
        ids = torch.tensor(text.token_ids, dtype=torch.int64).numpy().tobytes()
        name = hashlib.blake2b(ids, digest_size=16).hexdigest()
        return self.folder / name[:2] / f"{name}.safetensors"

    def _read(self, path: Path, text: TrainingText) -> TextFeatures | None:
        """The file's features; None if there is none, or it is torn: it is written again then."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if not path.is_file():
            return None
        device = self.source.target.device
        try:
            tensors: dict[str, Tensor] = load_file(path, device=str(device))
        except (SafetensorError, OSError):
            return None
        names = {layer: f"features.{layer}" for layer in self.source.layers}
        shape = (len(text.token_ids), self.source.target.hidden_size)
        ids = tensors.get("token_ids")
        if ids is None or ids.tolist() != list(text.token_ids):
            return None
        for name in (*names.values(), "hidden"):
            if name not in tensors or tensors[name].shape != shape:
                return None
        return TextFeatures(
            ids, {layer: tensors[name] for layer, name in names.items()}, tensors["hidden"]
        )

    def _write(self, path: Path, features: TextFeatures) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        tensors = {"token_ids": features.token_ids.cpu(), "hidden": features.hidden.cpu()}
        for layer, rows in features.features.items():
            # Two names for one tensor are refused, and the last layer may be `hidden` itself.
            tensors[f"features.{layer}"] = rows.cpu().clone()
        temporary = path.with_name(f".{path.stem}-{uuid4().hex}")
        try:
            self._begin()
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, temporary)
            os.replace(temporary, path)
        except (OSError, SafetensorError) as error:
            raise OutputError(
                f"{path}: features cannot be written: {error}. Make room, name another folder, or "
                "compute them on the fly (--features computed)"
            ) from error
        finally:
            temporary.unlink(missing_ok=True)

    # The folder ------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Say, in a folder that says nothing yet, what its features are of."""
        manifest = self.folder / MANIFEST
        if manifest.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{MANIFEST}-{uuid4().hex}"
        temporary.write_text(json.dumps(self._identity, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, manifest)

    def _check_folder(self) -> None:
        manifest = self.folder / MANIFEST
        if not self.folder.exists():
            return
        if not self.folder.is_dir():
            raise OutputError(f"{self.folder} is a file; expected a folder for features")
        if not manifest.exists():
            if any(self.folder.iterdir()):
                raise OutputError(
                    f"{self.folder} holds something that is no features (it has no {MANIFEST}); "
                    "name a new or an empty folder"
                )
            return
        try:
            found: Any = json.loads(manifest.read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise ValueError("expected an object")
        except (OSError, ValueError) as error:
            raise OutputError(
                f"{manifest} cannot be read ({error}); remove the folder, or name another"
            ) from error
        if differing := changes(self._identity, found):
            raise ChangedError(
                f"{self.folder} holds features of something else",
                differing,
                "name another folder (--features), or remove this one",
            )
