"""The routes of generated rows: which drafter served which tokens, and how many a round brought.

Rows are those of a run with `--rounds`. `draw_routes` makes a picture of several rows,
`route_text` the text of one row in the drafters' colours, for a terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whiflash_agents.engine.errors import OutputError

if TYPE_CHECKING:
    from rich.text import Text

    from whiflash_agents.token_text import TokenTexts

# Okabe and Ito's colours, which people with any kind of colour vision tell apart.
COLOURS = {
    "none": "#777777",
    "lookup": "#e69f00",
    "eagle3": "#0072b2",
    "dflash": "#d55e00",
    "ddtree": "#009e73",
}
SHADES = {"reasoning": "#eef3fb", "tool_call": "#fdf1e3", "content": "#f3f3f3"}


def colour(arm: str) -> str:
    """The colour of a drafter; black for one of somebody's own."""
    return COLOURS.get(arm, "#000000")


def draw_routes(rows: Sequence[dict[str, Any]], path: str | Path, title: str = "") -> None:
    """Draw one strip per row: over the output tokens, the tokens that each round brought, in the
    colour of its drafter; kinds of text (reasoning, tool call, content) shaded and named.

    Args:
        rows: output rows with `rounds`, at least one.
        path: the picture; its suffix names the format.

    Raises:
        ValueError: there is no row, or one without rounds.
        OutputError: it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    if not rows or not all(row["whiflash"].get("rounds") for row in rows):
        raise ValueError("routes are drawn of rows that were generated with rounds (--rounds)")
    figure, axes = pyplot.subplots(
        len(rows), 1, figsize=(12, 0.6 + 1.3 * len(rows)), layout="constrained", squeeze=False
    )
    drafted: dict[str, None] = {}
    for axis, row in zip(axes[:, 0], rows, strict=True):
        extra = row["whiflash"]
        shade_spans(axis, extra["spans"])
        name_spans(axis, extra["spans"])
        for record in extra["rounds"]:
            drafted[record["drafter"]] = None
            axis.bar(
                record["position"],
                record["emitted"],
                width=record["emitted"],
                align="edge",
                color=colour(record["drafter"]),
                ec="white",
                lw=0.5,
            )
        axis.set_xlim(0, max(1, len(extra["token_ids"])))
        axis.set_ylabel("tokens", fontsize=8)
        length = extra["speculative_decoding"]["mean_acceptance_length"]
        name = f"{row['custom_id']}  ({length:.2f} tokens a round)"
        axis.set_title(name, fontsize=8, loc="right", pad=2)
    axes[-1, 0].set_xlabel("output token; height: tokens that the round brought")
    figure.legend(
        handles=[Patch(color=colour(arm), label=arm) for arm in drafted],
        loc="outside upper left",
        ncols=len(drafted),
        fontsize=8,
        title=title or None,
    )
    save_figure(figure, path)


def shade_spans(axis: Any, spans: Sequence[dict[str, Any]]) -> None:
    """Shade the kinds of text behind what is drawn over output tokens."""
    for span in spans:
        axis.axvspan(span["start"], span["end"], color=SHADES.get(span["kind"], "#fff"), zorder=0)


def name_spans(axis: Any, spans: Sequence[dict[str, Any]]) -> None:
    """Write the kinds of text above `axis`, each where it begins."""
    for span in spans:
        axis.text(
            span["start"], 1.01, span["kind"], transform=axis.get_xaxis_transform(), fontsize=8
        )


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure of pyplot's and close it.

    Raises:
        OutputError: it cannot be written.
    """
    from matplotlib import pyplot

    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: the plot cannot be written: {error}") from error
    finally:
        pyplot.close(figure)


def route_text(row: dict[str, Any], texts: TokenTexts) -> Text:
    """The text of a row, each round in the colour of its drafter and set off from the next by a
    bar; tokens that no round brought (the first, from the prompt) stay plain.

    Raises:
        ValueError: the row was generated without rounds.
    """
    from rich.text import Text

    extra = row["whiflash"]
    if not extra.get("rounds"):
        raise ValueError("a route is shown of a row that was generated with rounds (--rounds)")
    decoded = texts.decode(extra["token_ids"])
    starts = [*decoded.starts, len(decoded.text)]
    shown, at = Text(), 0
    for record in sorted(extra["rounds"], key=lambda record: record["position"]):
        begin = record["position"]
        end = min(begin + record["emitted"], len(extra["token_ids"]))
        shown.append(decoded.text[starts[at] : starts[begin]])
        style = colour(record["drafter"])
        shown.append(decoded.text[starts[begin] : starts[end]], style=style)
        shown.append("|", style="dim")
        at = end
    shown.append(decoded.text[starts[at] :])
    return shown
