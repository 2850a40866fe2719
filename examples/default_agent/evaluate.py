"""Score the calls of generated turns against gold.jsonl; no model is loaded.

whiflash-batch run data/held_out.jsonl -o rows.jsonl --workers 0 --max-tokens 200
python examples/default_agent/evaluate.py rows.jsonl --gold data/gold.jsonl
python examples/default_agent/evaluate.py before.jsonl after.jsonl --gold data/gold.jsonl --by kind

Shares of the turns that should call something: `valid` (at least one call, and all of them parse,
name an offered tool and satisfy its schema), `names` (the right tools, as often as needed), `exact`
(also all arguments among the possible values) and `loose` (exact but for case, spaces and
punctuation of strings). Of the other turns, `silent` is the share without a call. `cut` counts
turns that ran into --max-tokens. Rows may be a part of the held-out turns; failed rows count as
wrong.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gold import calls_agree, loosely_equal
from schema_check import problems


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one generated turn got right. `expects_call` says which of the others apply."""

    category: str
    kind: str
    expects_call: bool
    valid: bool
    names: bool
    exact: bool
    loose: bool
    silent: bool
    cut: bool


def judge(row: dict[str, Any], gold: dict[str, dict[str, Any]]) -> Verdict:
    """The verdict on an output row of `whiflash-batch run`; `gold` is keyed by trace id.

    Raises SystemExit for a row whose turn has no gold.
    """
    trace_id, _, turn = row["custom_id"].rpartition("#")
    record = gold.get(trace_id)
    if record is None or int(turn) >= len(record["turns"]):
        raise SystemExit(
            f"row {row['custom_id']} has no gold: give the gold.jsonl that was written with the "
            "traces of this run"
        )
    expected = record["turns"][int(turn)]
    made, broken, cut = _calls(row)
    failed = row.get("response") is None
    parameters = {
        tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in record["tools"]
    }
    usable = all(
        name in parameters
        and isinstance(arguments, dict)
        and not problems(arguments, parameters[name])
        for name, arguments in made
    )
    valid = bool(made) and usable and not broken
    wanted = Counter(call["name"] for call in expected)
    return Verdict(
        category=record["category"],
        kind=record["kind"],
        expects_call=bool(expected),
        valid=valid,
        names=not broken and Counter(name for name, _ in made) == wanted,
        exact=valid and calls_agree(made, expected),
        loose=valid and calls_agree(made, expected, loosely_equal),
        silent=not (made or broken or failed),
        cut=cut,
    )


def _calls(row: dict[str, Any]) -> tuple[list[tuple[str, Any]], bool, bool]:
    """(calls that parse, whether there are others, whether the turn was cut off)."""
    if row.get("response") is None:
        return [], False, False
    choice = row["response"]["body"]["choices"][0]
    made, broken = [], bool(row["whiflash"]["invalid_tool_calls"])
    for call in choice["message"].get("tool_calls") or []:
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            broken = True
        else:
            made.append((call["function"]["name"], arguments))
    return made, broken, choice["finish_reason"] == "length"


def figures(verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """Counts and shares; a share of nothing is None."""
    verdicts = list(verdicts)
    calling = [verdict for verdict in verdicts if verdict.expects_call]
    others = [verdict for verdict in verdicts if not verdict.expects_call]
    return {
        "turns": len(verdicts),
        "calling": len(calling),
        "valid": _share(verdict.valid for verdict in calling),
        "names": _share(verdict.names for verdict in calling),
        "exact": _share(verdict.exact for verdict in calling),
        "loose": _share(verdict.loose for verdict in calling),
        "not calling": len(others),
        "silent": _share(verdict.silent for verdict in others),
        "cut": sum(verdict.cut for verdict in verdicts),
    }


def _share(hits: Iterable[bool]) -> float | None:
    hits = list(hits)
    return sum(hits) / len(hits) if hits else None


def report(verdicts: Iterable[Verdict], by: str) -> dict[str, dict[str, Any]]:
    """Figures of every group, and of `all`; `by` is `category` or `kind`."""
    verdicts = list(verdicts)
    groups: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        groups[getattr(verdict, by)].append(verdict)
    table = {name: figures(group) for name, group in sorted(groups.items())}
    return table | {"all": figures(verdicts)}


def table(groups: dict[str, dict[str, Any]]) -> str:
    """The report as text, one line a group."""
    columns = list(next(iter(groups.values())))
    width = max(len(name) for name in groups)
    lines = [" " * width + "".join(f"{column:>13}" for column in columns)]
    for name, values in groups.items():
        cells = "".join(f"{_cell(values[column]):>13}" for column in columns)
        lines.append(f"{name:<{width}}{cells}")
    return "\n".join(lines)


def _cell(value: float | int | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" if isinstance(value, float) else str(value)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file. Raises SystemExit where it cannot be read."""
    try:
        return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="+", type=Path, help="output of `whiflash-batch run`")
    parser.add_argument("--gold", type=Path, required=True, help="gold.jsonl of make_traces.py")
    parser.add_argument("--by", choices=["category", "kind"], default="category")
    parser.add_argument("--json", type=Path, help="write the figures of all files there")
    arguments = parser.parse_args()
    gold = {record["id"]: record for record in read_lines(arguments.gold)}
    reports = {}
    for path in arguments.rows:
        rows = read_lines(path)
        if not rows:
            raise SystemExit(f"{path} holds no rows")
        reports[str(path)] = report([judge(row, gold) for row in rows], arguments.by)
        print(f"{path}\n{table(reports[str(path)])}\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
