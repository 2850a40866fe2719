"""The demo behind `make demo`: example traces replayed twice, plainly and with drafting.

Both runs go through a Ray actor on the embedded model. The rows must be the same, token for token;
only the time differs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from whiflash_agents.batch import generated_part

TRACES = Path(__file__).with_name("traces.jsonl")
OPTIONS = ["--max-tokens", "48", "--concurrency", "2"]
ARMS = {"none": "plain decoding", "lookup": "drafts by lookup"}


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "demo-output")
    folder.mkdir(parents=True, exist_ok=True)
    for arm, what in ARMS.items():
        command = ["whiflash-batch", "run", str(TRACES), "--router", arm, *OPTIONS]
        command += ["-o", str(folder / f"{arm}.jsonl"), "--metrics", str(folder / f"{arm}.json")]
        print(f"\n{what}:\n$ {' '.join(command)}", flush=True)
        cli = "import sys; from whiflash_agents.cli import main; sys.exit(main())"
        done = subprocess.run([sys.executable, "-c", cli, *command[1:], "--overwrite"])
        if done.returncode:
            return done.returncode
    return compare(folder)


def compare(folder: Path) -> int:
    """Show both runs side by side; 1 if any row differs."""
    rows = {arm: read_rows(folder / f"{arm}.jsonl") for arm in ARMS}
    figures = {arm: json.loads((folder / f"{arm}.json").read_text()) for arm in ARMS}
    same = sum(rows["none"].get(key) == row for key, row in rows["lookup"].items())
    speedup = figures["lookup"]["tokens_per_second"] / figures["none"]["tokens_per_second"]

    table = Table(title="The same rows, faster")
    table.add_column("")
    for what in ARMS.values():
        table.add_column(what, justify="right")
    lengths = {a: f["speculative_decoding"]["mean_acceptance_length"] for a, f in figures.items()}
    table.add_row("rows", *(str(len(rows[arm])) for arm in ARMS))
    table.add_row("generated tokens", *(str(figures[arm]["tokens"]["generated"]) for arm in ARMS))
    table.add_row("tokens per round (acceptance length)", *(f"{lengths[a]:.2f}" for a in ARMS))
    table.add_row("tokens/s", *(f"{figures[arm]['tokens_per_second']:.1f}" for arm in ARMS))
    table.add_row("speed-up", "1.00", f"{speedup:.2f}")
    table.add_row("rows identical", "", f"{same} of {len(rows['none'])}")
    Console().print(table)
    print(f"Rows and figures are in {folder}/.")
    return 0 if same == len(rows["none"]) == len(rows["lookup"]) else 1


def read_rows(path: Path) -> dict[str, object]:
    """What was generated, by row id; times and drafting figures left out."""
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    return {row["custom_id"]: generated_part(row) for row in rows}


if __name__ == "__main__":
    sys.exit(main())
