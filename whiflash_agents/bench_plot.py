"""A benchmark's longest response, drawn round by round."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from whiflash_agents.bench import ROUTERS
from whiflash_agents.engine.errors import SettingsError
from whiflash_agents.route_plot import COLOURS, colour, name_spans, save_figure, shade_spans

if TYPE_CHECKING:
    from whiflash_agents.bench import Bench

_STYLES = ("-", (0, (6, 2)), (0, (3, 2)), (0, (1, 1.5)))


def check_plotting(path: str | Path, oracle: bool) -> None:
    """Raises SettingsError if nothing can be drawn here, or not in the format of `path`."""
    if not oracle:
        raise SettingsError("plot draws what the oracle is made from; leave out --no-oracle")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise SettingsError(
            "plot draws with matplotlib, which is not installed; "
            "pip install 'whiflash-agents[plots]'"
        ) from None
    known = FigureCanvasAgg.get_supported_filetypes()
    suffix = Path(path).suffix.removeprefix(".").lower()
    if suffix not in known:
        found = f"ends in .{suffix}" if suffix else "has no suffix"
        raise SettingsError(
            f"plot {path} {found}, so its format is not known; expected one of "
            f"{', '.join(f'.{name}' for name in sorted(known))}"
        )


def draw_response(bench: Bench, path: str | Path) -> None:
    """Draw the longest response: acceptance length of every arm at each output position, the route
    that a router took underneath, spans shaded.

    Raises:
        OutputError: it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    index = max(range(len(bench.labels)), key=lambda i: bench.labels[i].num_rounds)
    labels, row = bench.labels[index], bench.rows[index]
    router = next((r for r in reversed(ROUTERS) if r in row.outputs), list(row.outputs)[-1])
    extra = row.outputs[router]["whiflash"]
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(12, 5), sharex=True, height_ratios=[5, 1], layout="constrained"
    )
    for axis in (top, bottom):
        shade_spans(axis, extra["spans"])
    name_spans(top, extra["spans"])
    positions = range(1, labels.num_rounds + 1)
    longest = 1.0
    for column, arm in enumerate(labels.arms):
        lengths = labels.acceptance[:, column].tolist()
        longest = max([longest, *lengths])
        # Curves that coincide stay apart: those drawn later are thinner, and dashed.
        top.step(
            positions,
            lengths,
            where="post",
            label=arm,
            color=COLOURS.get(arm),
            lw=max(1.0, 4.0 - column),
            ls=_STYLES[column % len(_STYLES)],
        )
    top.set_ylim(0.0, max(2.0, 1.1 * longest))
    top.set_ylabel("acceptance length")
    drafted = dict.fromkeys(record["drafter"] for record in extra["rounds"])
    others = [Patch(color=colour(arm), label=arm) for arm in drafted if arm not in labels.arms]
    handles, _ = top.get_legend_handles_labels()
    top.legend(
        handles=[*handles, *others],
        loc="upper right",
        ncols=len(labels.arms) + len(others),
        fontsize=8,
    )
    for record in extra["rounds"]:
        bottom.barh(
            0,
            record["emitted"],
            left=record["position"],
            color=colour(record["drafter"]),
            ec="white",
        )
    bottom.set_yticks([])
    bottom.set_ylabel("route")
    bottom.set_xlabel(f"output token of {row.row.id} (colours: the arm that drafted; {router})")
    save_figure(figure, path)
