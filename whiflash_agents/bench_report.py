"""What is made of a benchmark: its file, tables for the terminal, one response drawn by rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from whiflash_agents.batch.writer import OutputFile
from whiflash_agents.engine.errors import OutputError, SettingsError

if TYPE_CHECKING:
    from rich.table import Table

    from whiflash_agents.bench import Bench
    from whiflash_agents.calibration import Calibration

_COLOURS = {
    "none": "#777777",
    "lookup": "#e69f00",
    "eagle3": "#0072b2",
    "dflash": "#d55e00",
    "ddtree": "#009e73",
}
_SHADES = {"reasoning": "#eef3fb", "tool_call": "#fdf1e3", "content": "#f3f3f3"}


def write_bench(
    bench: Bench,
    traces: Sequence[str | Path],
    output: str | Path,
    *,
    overwrite: bool = False,
    peers: Sequence[str] = (),
    plot: str | Path | None = None,
) -> dict[str, Any]:
    """Run `bench` over `traces`, write its figures to `output` and, if asked for, the plot.

    Raises:
        OutputError: a file exists and `overwrite` is not given, or cannot be written.
        What `Bench.run` raises.
    """
    if plot is not None and Path(plot).exists() and not overwrite:
        raise OutputError(f"{plot} exists already; give another file for plot, or overwrite")
    with OutputFile(output, inputs=list(traces), overwrite=overwrite) as out:
        figures = bench.run(traces)
        if peers and bench.rows:
            figures["peers"] = {"transformers": bench.run_peers()}
        out.write(orjson.dumps(figures, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    if plot is not None and bench.labels:
        draw_response(bench, plot)
    return figures


def tables_of(figures: dict[str, Any]) -> list[Table]:
    """All tables of a benchmark."""
    tables = [arms_table(figures)]
    tables += [groups_table(figures, by) for by in ("by_span", "by_category")]
    if figures["oracle"]:
        tables.append(oracle_table(figures))
    if figures["peers"]:
        tables.append(peers_table(figures))
    return tables


def arms_table(figures: dict[str, Any]) -> Table:
    """One line per arm and router."""
    from rich.table import Table

    same = f"{figures['rows_identical']} of {figures['rows']} rows identical"
    table = Table(title=f"{figures['target']}: {same}", title_style="bold")
    table.add_column("arm or router")
    headings = ("tokens/s", "speed-up", "acceptance", "round ms p50", "p95", "switches")
    for heading in (*headings, "switch %", "router %"):
        table.add_column(heading, justify="right")
    for name, its in figures["arms"].items():
        speedup = figures["speedup_over_none"].get(name, 1.0)
        table.add_row(
            name,
            f"{its['tokens_per_second']:.1f}",
            f"{speedup:.2f}",
            f"{its['mean_acceptance_length']:.2f}",
            f"{its['round_ms']['p50']:.1f}",
            f"{its['round_ms']['p95']:.1f}",
            f"{its['num_switches']}",
            f"{100 * its['switch_overhead']:.2f}",
            f"{100 * its['router_overhead']:.2f}",
        )
    return table


def groups_table(figures: dict[str, Any], by: str) -> Table:
    """Mean acceptance length by span kind (`by_span`) or category (`by_category`)."""
    from rich.table import Table

    table = Table(title=f"acceptance length {by.replace('_', ' ')}", title_style="bold")
    table.add_column("arm or router")
    groups = sorted({group for its in figures["arms"].values() for group in its[by]})
    for group in groups:
        table.add_column(group, justify="right")
    for name, its in figures["arms"].items():
        lengths = (its[by].get(group) for group in groups)
        table.add_row(
            name, *("–" if g is None else f"{g['mean_acceptance_length']:.2f}" for g in lengths)
        )
    return table


def oracle_table(figures: dict[str, Any]) -> Table:
    """What the best single arm and the oracles reach, in tokens per round and, by the measured
    costs, per second."""
    from rich.table import Table

    table = Table(title="oracles", title_style="bold")
    for heading in ("oracle", "acceptance, fewest rounds", "tokens/s by costs, fastest"):
        table.add_column(heading, justify="left" if heading == "oracle" else "right")
    by_rounds, by_seconds = figures["oracle"]["by_rounds"], figures["oracle"]["by_seconds"]
    for arm, its in by_rounds["single"].items():
        rate = by_seconds["single"][arm]["tokens_per_second"]
        table.add_row(f"always {arm}", f"{its['mean_acceptance_length']:.2f}", f"{rate:.1f}")
    for name in ("task", "prompt", "round_greedy", "round"):
        length = by_rounds[name]["mean_acceptance_length"]
        rate = by_seconds[name]["tokens_per_second"]
        table.add_row(f"per {name.replace('_', ' ')}", f"{length:.2f}", f"{rate:.1f}")
    return table


def threshold_table(found: Calibration) -> Table:
    """The thresholds that a calibration found."""
    from rich.table import Table

    title = f"{found.target}, eagle3 or dflash, from {found.rows} turns"
    table = Table(title=title, title_style="bold")
    for heading in ("router", "category", "threshold", "tokens/s by costs", "acceptance"):
        table.add_column(heading, justify="left" if heading in ("router", "category") else "right")
    for router, thresholds in (("entropy", found.entropy), ("neural", found.neural)):
        for category, its in thresholds.items():
            table.add_row(
                router,
                category,
                f"{its.value:.3f}",
                f"{its.tokens_per_second:.1f}",
                f"{its.mean_acceptance_length:.2f}",
            )
    return table


def training_table(report: dict[str, Any]) -> Table:
    """What a trained router is worth on held-out turns."""
    from rich.table import Table

    table = Table(title="router on turns held out", title_style="bold")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for output, r2 in report["r2"].items():
        table.add_row(f"R² of {output}", "–" if r2 is None else f"{r2:.3f}")
    for name, length in report["tokens_per_round"].items():
        label = f"tokens per round, {name.replace('_', ' ')}"
        if name == "best_single":
            label += f" ({report['best_single']})"
        table.add_row(label, f"{length:.3f}")
    table.add_row("regret against the oracle", f"{report['regret']:.3f}")
    captured = report["captured"]
    table.add_row("share of its gain", "–" if captured is None else f"{100 * captured:.1f} %")
    return table


def peers_table(figures: dict[str, Any]) -> Table:
    """transformers' ways of generating the same rows."""
    from rich.table import Table

    table = Table(title="transformers' generate on the same rows", title_style="bold")
    for heading in ("way", "tokens/s", "none is faster by", "rows identical"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for way, its in figures["peers"]["transformers"].items():
        if "left_out" in its:
            table.add_row(way, "–", "–", its["left_out"])
            continue
        table.add_row(
            way,
            f"{its['tokens_per_second']:.1f}",
            f"{its['none_over_it']:.2f}",
            f"{its['rows_identical']} of {figures['rows']}",
        )
    return table


def check_plotting(oracle: bool) -> None:
    """Raises SettingsError if nothing can be drawn here."""
    if not oracle:
        raise SettingsError("plot draws what the oracle is made from; leave out --no-oracle")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SettingsError(
            "plot draws with matplotlib, which is not installed; "
            "pip install 'whiflash-agents[plots]'"
        ) from None


def draw_response(bench: Bench, path: str | Path) -> None:
    """Draw the longest response: acceptance length of every arm at each output position, the route
    that the router took underneath, spans shaded.

    Raises:
        OutputError: it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    index = max(range(len(bench.labels)), key=lambda i: bench.labels[i].num_rounds)
    labels, row = bench.labels[index], bench.rows[index]
    router = next(name for name in reversed(list(row.outputs)) if name == "cost-aware")
    extra = row.outputs[router]["whiflash"]
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(12, 5), sharex=True, height_ratios=[5, 1], layout="constrained"
    )
    for axis in (top, bottom):
        for span in extra["spans"]:
            shade = _SHADES.get(span["kind"], "#ffffff")
            axis.axvspan(span["start"], span["end"], color=shade, zorder=0)
    for span in extra["spans"]:
        top.text(span["start"], 1.01, span["kind"], transform=top.get_xaxis_transform(), fontsize=8)
    positions = range(1, labels.num_rounds + 1)
    for column, arm in enumerate(labels.arms):
        lengths = labels.acceptance[:, column].tolist()
        top.step(positions, lengths, where="post", label=arm, color=_COLOURS.get(arm), lw=1.2)
    top.set_ylabel("acceptance length")
    top.legend(loc="upper right", ncols=len(labels.arms), fontsize=8)
    for record in extra["rounds"]:
        colour = _COLOURS.get(record["drafter"], "#000000")
        bottom.barh(0, record["emitted"], left=record["position"], color=colour, ec="white")
    bottom.set_yticks([])
    bottom.set_ylabel("route")
    bottom.set_xlabel(f"output token of {row.row.id} (colours: the arm that drafted; {router})")
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: the plot cannot be written: {error}") from error
    finally:
        pyplot.close(figure)
