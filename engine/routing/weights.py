"""Files of trained routers: one safetensors file, whose header says as JSON what it is.

The tensors and what they mean travel in one file, so they cannot be taken apart. What does not fit
the target is refused by name: a router that loads wrongly still routes, only badly.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, OutputError

_FIELD = "whiflash_router"  # of the file's header
_ROUTERS = {"neural": "neural", "acceptance": "cost-aware"}  # kind of file -> router it is for


@dataclass(frozen=True, slots=True)
class MadeFor:
    """One of the models that a router was trained for.

    Attributes:
        name: for people.
        identity: of its weights (`training.identity.network_identity`), whatever it is called.
    """

    name: str
    identity: str


def write_router(
    path: Path,
    fields: Mapping[str, Any],
    module: nn.Module,
    made_for: Mapping[str, MadeFor] | None = None,
) -> None:
    """Write a router's tensors, in float32, and `fields` to one file, which appears whole or not
    at all.

    Args:
        fields: at least `kind`, `hidden_size` and `arms`; JSON values.
        made_for: the target (`target`) and the drafters by network, if it is known.

    Raises:
        OutputError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {
        name: tensor.detach().float().cpu().contiguous()
        for name, tensor in module.state_dict().items()
    }
    header = dict(fields)
    if made_for is not None:
        header["made_for"] = {part: asdict(model) for part, model in made_for.items()}
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        os.close(handle)
        save_file(tensors, temporary, metadata={_FIELD: json.dumps(header, sort_keys=True)})
        umask = os.umask(0o022)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # temporary files are for the owner alone
        os.replace(temporary, path)
        temporary = None
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"router file {str(path)!r} cannot be written: {error}. Give a path on a file system "
            "with room, where you may write"
        ) from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def read_router(path: Path, *, kind: str, hidden_size: int) -> tuple[dict[str, Any], Weights]:
    """The fields and tensors of a router file.

    Args:
        kind: what it must be.
        hidden_size: of the target it is to route for.

    Raises:
        CheckpointError: it is missing, damaged, no router, another kind of router, or made for a
            target of another width.
    """
    fields, tensors = _read(path)
    weights = Weights(path, fields, tensors)
    found, wanted = _ROUTERS.get(str(fields.get("kind"))), _ROUTERS.get(kind, kind)
    if fields.get("kind") != kind:
        whose = f"it was trained for router {found}" if found else "no router is known for it"
        other = f", or route with --router {found}" if found else ""
        raise CheckpointError(
            f"{path}: field 'kind' is {fields.get('kind')!r}, expected {kind!r}: {whose}, and "
            f"router {wanted} was asked for. Train one with `whiflash-batch train router --kind "
            f"{wanted}`{other}"
        )
    weights.must_equal("hidden_size", hidden_size, "the target's hidden size")
    arms = fields.get("arms")
    if not isinstance(arms, list) or not arms or not all(isinstance(a, str) for a in arms):
        raise weights.error("arms", "a list of names of drafters")
    return fields, weights


def router_of(path: str | Path) -> str | None:
    """The router that a file is for (`neural`, `cost-aware`); None for a kind that is not known.
    Only the header is read.

    Raises:
        CheckpointError: it is missing, damaged, or no router.
    """
    fields, _ = _read(Path(path), tensors=False)
    return _ROUTERS.get(str(fields.get("kind")))


def models_of(path: str | Path) -> dict[str, MadeFor]:
    """What a router was trained for: `target`, and the drafters by network. Empty where the file
    does not say so. Only the header is read.

    Raises:
        CheckpointError: it is missing, damaged, or no router.
    """
    fields, _ = _read(Path(path), tensors=False)
    told = fields.get("made_for", {})
    try:
        return {part: MadeFor(str(its["name"]), str(its["identity"])) for part, its in told.items()}
    except (AttributeError, TypeError, KeyError):
        raise Weights(Path(path), fields, {}).error(
            "made_for", "a name and an identity per model"
        ) from None


def _read(path: Path, *, tensors: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and, if asked for, tensors of a file of whatever kind."""
    from safetensors import SafetensorError, safe_open

    if path.is_dir():
        raise CheckpointError(
            f"router file {str(path)!r} is a folder; give the file that `whiflash-batch train "
            "router` wrote (--router-weights FILE)"
        )
    if not path.is_file():
        raise CheckpointError(
            f"router file {str(path)!r} is not there; train one (`whiflash-batch train router`) or "
            "give the path of one"
        )
    try:
        with safe_open(path, framework="pt") as content:
            header = (content.metadata() or {}).get(_FIELD)
            names = content.keys() if tensors else ()
            found = {name: content.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors ({error}): it is damaged or no router file; "
            "train or fetch it again"
        ) from error
    try:
        fields = json.loads(header or "null")
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise CheckpointError(
            f"{path}: header field {_FIELD!r} is {header!r}, expected a JSON object: these are "
            "weights of something else. Give a file that `whiflash-batch train router` wrote"
        )
    return fields, found


class Weights:
    """What stands in one router file.

    Args:
        tensors: by name.
    """

    def __init__(self, path: Path, fields: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.path = path
        self.fields = fields
        self.tensors = tensors

    def error(self, field: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: field {field!r} is {self.fields.get(field)!r}, expected {expected}; use "
            "a router that was trained for this target and these drafters"
        )

    def must_equal(self, field: str, value: object, whose: str) -> None:
        """Raises: CheckpointError: the field has another value."""
        if self.fields.get(field) != value:
            raise self.error(field, f"{value!r} ({whose})")

    def number(self, field: str) -> float:
        """Raises: CheckpointError: the field is no finite number."""
        value = self.fields.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(field, "a number")
        if not math.isfinite(value):
            raise self.error(field, "a number that is finite")
        return float(value)

    def fill(self, module: nn.Module) -> None:
        """Load the tensors into `module`.

        Raises:
            CheckpointError: one is missing, unexpected, of another shape, or not finite.
        """
        expected = module.state_dict()
        remedy = "use a router that was trained for this target and these drafters"
        for name, tensor in expected.items():
            if name not in self.tensors:
                raise CheckpointError(f"{self.path}: tensor {name!r} is missing; {remedy}")
            found = self.tensors[name]
            if found.shape != tensor.shape:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} has shape {list(found.shape)}, expected "
                    f"{list(tensor.shape)}; {remedy}"
                )
            if not bool(torch.isfinite(found).all()):
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} holds values that are not finite; train it again"
                )
        if strange := sorted(set(self.tensors) - set(expected)):
            raise CheckpointError(
                f"{self.path}: tensor {strange[0]!r} is not expected (the router has "
                f"{', '.join(expected)}); {remedy}"
            )
        module.load_state_dict(self.tensors)
