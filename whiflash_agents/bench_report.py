"""What is made of a study: a benchmark's file, and tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from rich.markup import escape

from whiflash_agents.batch.writer import OutputFile
from whiflash_agents.bench import ROUTERS
from whiflash_agents.bench_peers import check_greedy
from whiflash_agents.bench_plot import draw_response
from whiflash_agents.engine.request import SamplingParams
from whiflash_agents.study_outputs import check_file, used_files

if TYPE_CHECKING:
    from rich.table import Table

    from whiflash_agents.bench import Bench
    from whiflash_agents.calibration import Calibration


def write_bench(
    bench: Bench,
    traces: Sequence[str | Path],
    output: str | Path,
    *,
    overwrite: bool = False,
    peers: Sequence[str] = (),
    plot: str | Path | None = None,
    config: str | Path | None = None,
) -> dict[str, Any]:
    """Run `bench` over `traces`, write its figures to `output` and, if asked for, the plot.

    Figures are written when all turns are generated, and anew with every part that comes later, so
    that nothing is lost with a part that fails. A peer's failure is one of its figures.

    Args:
        config: the file of settings, which is not overwritten either.

    Raises:
        OutputError: a file exists and `overwrite` is not given, is an input, or cannot be written.
        What `Bench.run` raises.
    """
    used = used_files(bench.settings, traces, config)
    if plot is not None:
        check_file(plot, option="plot", inputs=[*used, output], overwrite=overwrite)
    if peers:
        check_greedy(SamplingParams(**bench.settings.sampling.params()))
    with OutputFile(output, inputs=used, overwrite=overwrite) as out:
        figures: dict[str, Any] = {}

        def keep(known: dict[str, Any], *, whole: bool = False) -> None:
            figures.update(known)
            if whole or out.can_replace:
                out.write(_json(figures), anew=True)

        try:
            bench.run(traces, keep=keep)
            if peers and bench.rows and not bench.interrupted:
                figures["peers"] = {"transformers": _peer_figures(bench)}
        except KeyboardInterrupt:
            bench.interrupted = True
            raise
        finally:
            if figures:
                figures["interrupted"] = bench.interrupted
                keep({}, whole=True)
    if plot is not None and bench.labels and not bench.interrupted:
        draw_response(bench, plot)
    return figures


def _peer_figures(bench: Bench) -> dict[str, Any]:
    try:
        return bench.run_peers()
    except Exception as error:  # a foreign library's: whatever it is, the figures stand
        told = {"type": type(error).__name__, "message": " ".join(str(error).split())}
        return {"error": told}


def failed_peers(figures: dict[str, Any]) -> list[str]:
    """What went wrong with each peer that failed."""
    return [
        f"peer {name} failed: {its['error']['type']}: {its['error']['message']}"
        for name, its in figures["peers"].items()
        if "error" in its
    ]


def _json(figures: dict[str, Any]) -> bytes:
    return orjson.dumps(figures, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def tables_of(figures: dict[str, Any]) -> list[Table]:
    """All tables of a benchmark; each fits 80 columns, if names are not very long."""
    tables = [arms_table(figures)]
    if figures.get("errors"):
        tables.append(errors_table(figures))
    if not figures["rows"]:
        return tables
    tables.append(switches_table(figures))
    for by in ("by_span", "by_category"):
        tables += groups_tables(figures, by)
    if figures["oracle"]:
        tables.append(oracle_table(figures))
    if any("error" not in its for its in figures["peers"].values()):
        tables.append(peers_table(figures))
    return tables


def arms_table(figures: dict[str, Any]) -> Table:
    """How fast every arm and router is: with prompts, and in decoding alone."""
    from rich.table import Table

    title = f"{figures['target']}: {figures['rows_identical']} of {figures['rows']} rows identical"
    if figures["rows_failed"]:
        title += f", {figures['rows_failed']} failed"
    if figures.get("interrupted"):
        title += " (interrupted)"
    table = Table(title=title, title_style="bold")
    table.add_column("contender", no_wrap=True)
    for heading in ("tokens/s", "speed-up", "decoding", "acceptance", "ms p50", "ms p95"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, its in figures["arms"].items():
        speedups = [
            1.0 if name == "none" else figures[key].get(name)
            for key in ("speedup_over_none", "decode_speedup_over_none")
        ]
        table.add_row(
            name,
            f"{its['tokens_per_second']:.1f}",
            *("–" if speedup is None else f"{speedup:.2f}" for speedup in speedups),
            f"{its['mean_acceptance_length']:.2f}",
            f"{its['round_ms']['p50']:.1f}",
            f"{its['round_ms']['p95']:.1f}",
        )
    return table


def switches_table(figures: dict[str, Any]) -> Table:
    """What switching and routing cost the routers; arms that draft alone are left out."""
    from rich.table import Table

    table = Table(title="switching and routing", title_style="bold")
    table.add_column("router", no_wrap=True)
    for heading in ("rounds", "switches", "% of round time", "routing, % of step time"):
        table.add_column(heading, justify="right")
    for name, its in figures["arms"].items():
        if name not in ROUTERS:
            continue
        table.add_row(
            name,
            f"{its['rounds']}",
            f"{its['num_switches']}",
            f"{100 * its['switch_overhead']:.2f}",
            f"{100 * its['router_overhead']:.2f}",
        )
    return table


def errors_table(figures: dict[str, Any]) -> Table:
    """Rows that failed, by the type of their error, with the first of each."""
    from rich.table import Table

    table = Table(title="rows that failed", title_style="bold")
    table.add_column("error", overflow="fold")
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("the first", overflow="fold")
    for kind, its in figures["errors"].items():
        first = its["first"]
        table.add_row(kind, str(its["rows"]), escape(f"{first['row']}: {first['message']}"))
    return table


def groups_tables(figures: dict[str, Any], by: str) -> list[Table]:
    """Mean acceptance length by span kind (`by_span`) or category (`by_category`); as many tables
    as it takes for each to fit 80 columns."""
    from rich.table import Table

    groups = sorted({group for its in figures["arms"].values() for group in its[by]})
    tables = []
    for part in _parts(groups, 80 - 4 - len("arm or router")):
        table = Table(title=f"acceptance length {by.replace('_', ' ')}", title_style="bold")
        table.add_column("arm or router", no_wrap=True)
        for group in part:
            table.add_column(escape(group), justify="right", overflow="fold")
        for name, its in figures["arms"].items():
            lengths = (its[by].get(group) for group in part)
            table.add_row(
                name, *("–" if g is None else f"{g['mean_acceptance_length']:.2f}" for g in lengths)
            )
        tables.append(table)
    return tables


def _parts(names: Sequence[str], width: int) -> list[list[str]]:
    """`names` in order, as headings that stand beside each other in `width` columns."""
    parts: list[list[str]] = []
    left = 0
    for name in names:
        needed = max(4, len(name)) + 3
        if not parts or needed > left:
            parts.append([])
            left = width
        parts[-1].append(name)
        left -= needed
    return parts


def oracle_table(figures: dict[str, Any]) -> Table:
    """What the best single arm and the oracles reach, in tokens per round and, by the measured
    costs, per second."""
    from rich.table import Table

    table = Table(title="oracles", title_style="bold")
    table.add_column("oracle", no_wrap=True)
    for heading in ("acceptance, fewest rounds", "tokens/s by costs, fastest"):
        table.add_column(heading, justify="right")
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

    title = f"{found.models['target']}, eagle3 or dflash, from {found.rows} turns"
    table = Table(title=title, title_style="bold")
    table.add_column("router", no_wrap=True)
    table.add_column("category", overflow="fold")
    for heading in ("threshold", "tokens/s by costs", "acceptance"):
        table.add_column(heading, justify="right")
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
            f"{its['rows_identical']} of {its.get('rows', figures['rows'])}",
        )
    return table
