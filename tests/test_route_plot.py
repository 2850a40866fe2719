"""Routes, drawn and in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from whiflash_agents.engine.errors import OutputError
from whiflash_agents.route_plot import COLOURS, draw_routes, route_text
from whiflash_agents.token_text import TokenText


class Letters:
    """A tokenizer with a token per letter."""

    def decode(self, token_ids: list[int]) -> TokenText:
        return TokenText("".join(map(chr, token_ids)), list(range(len(token_ids))))


def row(*rounds: tuple[int, int, str], text: str = "abcdefgh") -> dict[str, Any]:
    return {
        "custom_id": "t#0",
        "whiflash": {
            "token_ids": [ord(letter) for letter in text],
            "spans": [{"kind": "reasoning", "start": 0, "end": len(text)}],
            "speculative_decoding": {"mean_acceptance_length": 2.0},
            "rounds": [
                {"position": position, "emitted": emitted, "drafter": drafter}
                for position, emitted, drafter in rounds
            ],
        },
    }


def test_every_round_has_the_colour_of_its_drafter() -> None:
    shown = route_text(row((1, 3, "eagle3"), (4, 1, "none"), (5, 3, "dflash")), Letters())
    assert shown.plain == "abcd|e|fgh|"
    coloured = {shown.plain[s.start : s.end]: s.style for s in shown.spans if s.style != "dim"}
    assert coloured == {"bcd": COLOURS["eagle3"], "e": COLOURS["none"], "fgh": COLOURS["dflash"]}


def test_tokens_that_no_round_brought_stay_plain() -> None:
    shown = route_text(row((2, 2, "eagle3"), (6, 1, "dflash")), Letters())
    assert shown.plain == "abcd|efg|h"
    assert [shown.plain[s.start : s.end] for s in shown.spans] == ["cd", "|", "g", "|"]


def test_a_round_cut_by_a_stop_ends_with_the_text() -> None:
    assert route_text(row((1, 9, "eagle3"), text="abc"), Letters()).plain == "abc|"


def test_text_of_a_row_is_no_markup() -> None:
    shown = route_text(row((1, 6, "eagle3"), text="[red]x["), Letters())
    assert shown.plain == "[red]x[|"


def test_routes_are_drawn(tmp_path: Path) -> None:
    rows = [row((1, 3, "eagle3"), (4, 4, "dflash")), row((1, 7, "mine"))]
    draw_routes(rows, tmp_path / "routes.png")
    assert (tmp_path / "routes.png").read_bytes().startswith(b"\x89PNG")


def test_rows_without_rounds_are_refused(tmp_path: Path) -> None:
    for rows in ([], [row()]):
        with pytest.raises(ValueError, match="--rounds"):
            draw_routes(rows, tmp_path / "routes.png")
    with pytest.raises(ValueError, match="--rounds"):
        route_text(row(), Letters())


def test_a_picture_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        draw_routes([row((1, 7, "eagle3"))], tmp_path / "missing" / "routes.png")
