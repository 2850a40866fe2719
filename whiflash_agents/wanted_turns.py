"""The turns that a training asks its target for: known before the first of them is generated.

Generating takes hours, so what can be said of a training's texts by their prompts alone is said
first. What a training was begun with is kept beside its checkpoints (`wanted.json`), and a sitting
that would ask for other turns is refused before it generates them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whiflash_agents.engine.errors import ChangedError, OutputError

FILE = "wanted.json"
_VERSION = 1


def trace_of_row(row_id: str) -> str:
    """The id of the trace that a row or a text is of."""
    return row_id.rpartition("#")[0]


@dataclass(slots=True)
class WantedTurns:
    """Turns that texts are made of, in the order of the traces.

    Attributes:
        answers: what the responses depend on beside their prompts.
        prompts: digest of the prompt, by the id of the row.
        missing: ids of the rows that no response is kept of.
    """

    answers: Mapping[str, Any]
    prompts: dict[str, str] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)

    def add(self, row_id: str, prompt: Sequence[int], *, missing: bool) -> None:
        """Take in a row that a text is wanted of."""
        digest = hashlib.blake2b(json.dumps(list(prompt)).encode(), digest_size=16)
        self.prompts[row_id] = digest.hexdigest()
        if missing:
            self.missing.add(row_id)

    def traces(self) -> list[str]:
        """Ids of the traces that the rows are of."""
        return list(dict.fromkeys(map(trace_of_row, self.prompts)))

    def check(self, folder: Path, held_out: Collection[str]) -> None:
        """Refuse to ask for other turns than the training in `folder` was begun with. Without a
        file of them, as for recorded turns, there is nothing to refuse.

        Args:
            held_out: ids of traces that are not trained on.

        Raises:
            ChangedError: they are others.
        """
        try:
            begun = json.loads((folder / FILE).read_text(encoding="utf-8"))
            if begun["version"] != _VERSION:
                return
            then = {**begun["answers"], "turns": begun["turns"]}
        except (OSError, ValueError, KeyError, TypeError):
            return  # the texts themselves are compared once they are there
        from whiflash_agents.engine.training.identity import changes

        now = json.loads(json.dumps({**self.answers, "turns": self._told(held_out)}, default=str))
        if found := changes(now, then):
            raise ChangedError(
                f"the training in {folder} was begun with something else",
                found,
                "go on with what it was begun with, or begin anew (--restart)",
            )

    def keep(self, folder: Path, held_out: Collection[str]) -> None:
        """Write the file for the next sitting's `check`.

        Raises:
            OutputError: it cannot be written.
        """
        values = {"version": _VERSION, "answers": self.answers, "turns": self._told(held_out)}
        temporary = folder / f".{FILE}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(values, indent=1, default=str)
            temporary.write_text(text + "\n", encoding="utf-8")
            os.replace(temporary, folder / FILE)
        except OSError as error:
            raise OutputError(
                f"{folder / FILE} cannot be written: {error.strerror or error}"
            ) from error

    def _told(self, held_out: Collection[str]) -> dict[str, Any]:
        trained = [x for x in self.prompts.items() if trace_of_row(x[0]) not in held_out]
        digest = hashlib.blake2b(json.dumps(trained).encode(), digest_size=16)
        return {"count": len(trained), "fingerprint": digest.hexdigest()}


class TurnCheck:
    """What is checked of the turns before they are generated, and kept once training begins.

    Args:
        begun: folder of the checkpoints that training goes on from; None where it begins anew.
        share: of the traces that is held out.
    """

    def __init__(self, begun: Path | None, share: float) -> None:
        self._begun, self._share = begun, share
        self._found: tuple[WantedTurns, set[str]] | None = None

    def check(self, wanted: WantedTurns) -> None:
        """Refuse turns that nothing can be held out of, or that are not those that training was
        begun with.

        Raises:
            SettingsError: they are of fewer than two traces.
            ChangedError: they are others.
        """
        from whiflash_agents.engine.training.held_out import held_out_groups

        traces = wanted.traces()
        if not traces:
            return  # told later, with the reasons that they are left out for
        held_out = held_out_groups(traces, self._share)
        if self._begun is not None:
            wanted.check(self._begun, held_out)
        self._found = wanted, held_out

    def keep(self, folder: Path) -> None:
        """Keep in `folder` what was checked; nothing, where nothing was to be generated."""
        if self._found is not None:
            wanted, held_out = self._found
            wanted.keep(folder, held_out)
