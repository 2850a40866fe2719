"""The demo behind `make demo`: recorded agent traces replayed by the default agent twice, with
plain decoding, and routed among its drafters.

Both runs go through a Ray actor. The rows must be the same, token for token; only the time differs.
The route that the second run took is shown over the text of one row, and drawn for several.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from whiflash_agents.batch import generated_part
from whiflash_agents.models import resolve_model
from whiflash_agents.route_plot import colour, draw_routes, route_text
from whiflash_agents.token_text import TokenTexts

TRACES = Path(__file__).with_name("agent_traces.jsonl")
OPTIONS = ["--max-tokens", "96", "--concurrency", "2"]
ARMS = {"none": "plain decoding", "cost-aware": "routed"}
DRAWN = 6


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "demo-output")
    folder.mkdir(parents=True, exist_ok=True)
    for arm, what in ARMS.items():
        command = ["whiflash-batch", "run", str(TRACES), "--router", arm, *OPTIONS]
        command += ["-o", str(folder / f"{arm}.jsonl"), "--metrics", str(folder / f"{arm}.json")]
        command += ["--rounds"] if arm == "cost-aware" else []
        print(f"\n{what}:\n$ {' '.join(command)}", flush=True)
        cli = "import sys; from whiflash_agents.cli import main; sys.exit(main())"
        done = subprocess.run([sys.executable, "-c", cli, *command[1:], "--overwrite"])
        if done.returncode:
            return done.returncode
    rows = {arm: read_rows(folder / f"{arm}.jsonl") for arm in ARMS}
    show_routes(rows["cost-aware"], folder / "routes.png")
    return compare(rows, folder)


def compare(rows: dict[str, list[dict[str, Any]]], folder: Path) -> int:
    """Show both runs side by side; 1 if any row differs."""
    parts = {
        arm: {row["custom_id"]: generated_part(row) for row in its} for arm, its in rows.items()
    }
    figures = {arm: json.loads((folder / f"{arm}.json").read_text()) for arm in ARMS}
    plain = parts["none"]
    same = {
        arm: sum(plain.get(key) == row for key, row in its.items()) for arm, its in parts.items()
    }
    speed = {arm: its["tokens_per_second"] for arm, its in figures.items()}
    lengths = {a: f["speculative_decoding"]["mean_acceptance_length"] for a, f in figures.items()}

    table = Table(title="The same rows, faster")
    table.add_column("")
    for what in ARMS.values():
        table.add_column(what, justify="right")
    table.add_row("rows", *(str(len(rows[arm])) for arm in ARMS))
    table.add_row("generated tokens", *(str(figures[arm]["tokens"]["generated"]) for arm in ARMS))
    table.add_row("tokens per round (acceptance length)", *(f"{lengths[a]:.2f}" for a in ARMS))
    table.add_row("tokens/s", *(f"{speed[arm]:.1f}" for arm in ARMS))
    table.add_row("speed-up", *(f"{speed[arm] / speed['none']:.2f}" for arm in ARMS))
    table.add_row("rows identical", "", *(f"{same[arm]} of {len(plain)}" for arm in list(ARMS)[1:]))
    Console().print(table)
    print(f"Rows, figures and the picture of the routes (routes.png) are in {folder}/.")
    return 0 if all(len(plain) == same[arm] == len(rows[arm]) for arm in ARMS) else 1


def show_routes(rows: list[dict[str, Any]], picture: Path) -> None:
    """The route of the row that changed its drafter most often, in the terminal; a picture of
    several such rows."""
    rows = [row for row in rows if row["whiflash"]["rounds"]]
    rows = sorted(rows, key=num_changes, reverse=True)[:DRAWN]
    draw_routes(rows, picture)
    from transformers import AutoTokenizer

    texts = TokenTexts(AutoTokenizer.from_pretrained(resolve_model().path))
    drafters = dict.fromkeys(record["drafter"] for record in rows[0]["whiflash"]["rounds"])
    legend = Text("  ").join(Text(f"■ {name}", style=colour(name)) for name in drafters)
    title = f"{rows[0]['custom_id']}: who drafted what, round by round"
    print()
    Console().print(Panel(route_text(rows[0], texts), title=title, subtitle=legend))


def num_changes(row: dict[str, Any]) -> int:
    drafters = [record["drafter"] for record in row["whiflash"]["rounds"]]
    return sum(a != b for a, b in pairwise(drafters))


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
