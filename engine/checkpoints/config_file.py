"""Reading `config.json` of a checkpoint, field by field.

Every reader asks for the fields it needs with their types, so that a wrong config is an error that
names file, field, value and what was expected, and never a wrong drafter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

_REMEDY = "correct the field, or fetch the checkpoint again"


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of `config.json`, or of one object inside it. JSON's null counts as absent.

    Attributes:
        file: the `config.json`.
        values: field names and values as they stand there.
        prefix: where in the file they stand, like `dflash_config.`.
    """

    file: Path
    values: Mapping[str, Any]
    prefix: str = ""

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def error(self, name: str, expected: str, remedy: str = _REMEDY) -> CheckpointError:
        """The error for a field with a wrong value, or without one."""
        found = f"is {_shown(self.values[name])}" if name in self else "is missing"
        return CheckpointError(
            f"{self.file}: field {self.prefix + name!r} {found}; expected {expected}. "
            f"{remedy[0].upper()}{remedy[1:]}"
        )

    def integer(self, name: str, *, minimum: int = 1) -> int:
        """A whole number that must be there."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, f"a whole number of at least {minimum}")
        return value

    def number(self, name: str) -> float | None:
        """A number, or None where there is none."""
        if name not in self:
            return None
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "a number")
        return float(value)

    def flag(self, name: str) -> bool | None:
        """True or false, or None where the field is absent."""
        if name not in self:
            return None
        value = self.values[name]
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """A string, or None where there is none."""
        if name not in self:
            return None
        value = self.values[name]
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings, empty where there is none."""
        if name not in self:
            return ()
        value = self.values[name]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, "a list of strings")
        return tuple(value)

    def layer_ids(self, name: str, *, first: int, last: int) -> tuple[int, ...]:
        """Distinct layer ids, each from `first` to `last` of the target; must be there."""
        value = self.values.get(name)
        if (
            not isinstance(value, list)
            or not value
            or not all(isinstance(item, int) and not isinstance(item, bool) for item in value)
            or len(set(value)) < len(value)
            or min(value) < first
            or max(value) > last
        ):
            raise self.error(
                name,
                f"a list of distinct layer ids from {first} to {last}, as the target has them",
                "give the target that this drafter was trained for, or correct the field",
            )
        return tuple(value)

    def section(self, name: str) -> Fields | None:
        """The object under `name`, or None where there is none."""
        if name not in self:
            return None
        value = self.values[name]
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(self.file, value, f"{self.prefix}{name}.")

    def must_equal(self, name: str, value: int, what: str) -> None:
        """Refuse unless the field is there and equals `value`, which is `what`.

        Raises:
            CheckpointError: names the field and both values.
        """
        if self.integer(name, minimum=0) != value:
            raise self.error(
                name,
                f"{value}, {what}",
                "give the target that this drafter was trained for, or a drafter of this target",
            )


def read_config(folder: Path) -> Fields:
    """Read `config.json` of a checkpoint folder.

    Raises:
        CheckpointError: there is no such folder or file, or it is no JSON object.
    """
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(
            f"checkpoint {str(folder)!r} {kind}; expected a folder with config.json and weights. "
            "Give the folder of a drafter"
        )
    return read_fields(folder / "config.json")


def read_fields(file: Path) -> Fields:
    """Read a JSON file of fields.

    Raises:
        CheckpointError: there is no such file, or it is no JSON object.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"checkpoint {str(file.parent)!r} has no {file.name}, without which its weights mean "
            "nothing; fetch the checkpoint again"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read as JSON ({error}); fetch the checkpoint again"
        ) from error
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{file} holds {_shown(values)}; expected a JSON object. Fetch the checkpoint again"
        )
    return Fields(file, values)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
