"""Loading a drafter's checkpoint: tell the format by its config, refuse the rest by name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..drafters.dflash_model import DFlashModel
from ..drafters.eagle3_model import Eagle3Model
from ..errors import CheckpointError
from ..target import Target
from .config_file import Fields, read_config
from .dflash import read_dflash
from .eagle3 import read_eagle3
from .heads import read_local_head
from .speculators import read_speculators_dflash, read_speculators_eagle3

Kind = Literal["EAGLE-3", "DFlash"]

_PLACES = {
    "EAGLE-3": "as eagle3 (--eagle3, with router eagle3; load_eagle3 in Python)",
    "DFlash": "as dflash (--dflash, with router dflash or ddtree; load_dflash in Python)",
}
_NAMES = {"EAGLE-3": "an EAGLE-3 drafter", "DFlash": "a DFlash drafter"}
_SPECULATORS: dict[str, Kind] = {"eagle3": "EAGLE-3", "dflash": "DFlash"}


def load_eagle3(path: str | Path, target: Target) -> Eagle3Model:
    """Load an EAGLE-3 drafter for `target` from a folder, original or `speculators` layout.

    Returns:
        the network in eval mode, on the target's device, in its dtype, without gradients.

    Raises:
        CheckpointError: it is no EAGLE-3 checkpoint, is damaged or not supported, or was made for
            another target.
    """
    fields = read_config(Path(path))
    _require(fields, "EAGLE-3")
    if "speculators_model_type" in fields:
        return read_speculators_eagle3(fields, target)
    return read_eagle3(fields, target)


def load_dflash(path: str | Path, target: Target) -> DFlashModel:
    """Load a DFlash drafter for `target` from a folder, z-lab's or `speculators` layout, with the
    local head that may lie beside it.

    Returns:
        the network in eval mode, on the target's device, in its dtype, without gradients.

    Raises:
        CheckpointError: it is no DFlash checkpoint, is damaged or not supported, or was made for
            another target.
    """
    fields = read_config(Path(path))
    _require(fields, "DFlash")
    if "speculators_model_type" in fields:
        network = read_speculators_dflash(fields, target)
    else:
        network = read_dflash(fields, target)
    network.local_head = read_local_head(fields.file.parent, network, target)
    return network


def _require(fields: Fields, wanted: Kind) -> None:
    found = _kind(fields)
    if found != wanted:
        raise CheckpointError(
            f"checkpoint {str(fields.file.parent)!r} holds {_NAMES[found]}, expected {wanted}; "
            f"give it {_PLACES[found]}, or give the folder of another drafter"
        )


def _kind(fields: Fields) -> Kind:
    supported = "expected an EAGLE-3 or a DFlash drafter"
    folder = f"checkpoint {str(fields.file.parent)!r}"
    speculator = fields.text("speculators_model_type")
    if speculator is not None:
        if speculator not in _SPECULATORS:
            raise fields.error(
                "speculators_model_type",
                f"one of {', '.join(_SPECULATORS)}",
                "speculators of this kind are not supported; use another drafter",
            )
        return _SPECULATORS[speculator]
    names = fields.texts("architectures")
    for name in names:
        lower = name.lower()
        if name == "DFlashDraftModel":
            return "DFlash"
        if lower.startswith("dflash2"):
            raise CheckpointError(
                f"{folder} holds a DFlash 2 drafter ({name}: candidate selector and convolutions), "
                f"which is not supported; {supported}. Use a DFlash drafter of this target"
            )
        if "eagle3" in lower:
            return "EAGLE-3"
        if "eagle" in lower:
            raise CheckpointError(
                f"{folder} holds a drafter of the first EAGLE generations ({name}), which is not "
                f"supported; {supported}. Use an EAGLE-3 drafter of this target"
            )
        if "dflash" in lower:
            raise CheckpointError(
                f"{folder} holds a variant of DFlash ({name}), which is not supported; "
                f"{supported}. Use a drafter whose architecture is DFlashDraftModel"
            )
    # Trainers that keep the target's architecture name still write the format's own fields.
    if "dflash_config" in fields and "draft_vocab_size" not in fields:
        return "DFlash"
    if "draft_vocab_size" in fields and "dflash_config" not in fields:
        return "EAGLE-3"
    raise CheckpointError(
        f"{folder} is of architecture {', '.join(names) or 'unknown'} and holds no drafter that is "
        f"known; {supported}. Give the drafter's folder, not the target's"
    )
