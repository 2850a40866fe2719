"""Replay recorded traces with every drafter: same tokens, each position prefilled once.

    python benchmarks/replay.py ../shared/data/traces/tau_airline.json --limit 20

Prints rows, speed and acceptance per arm, the ratio of positions prefilled to distinct prompt
positions, and whether the arms' token ids are identical.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from whiflash_agents.batch import WhiFlashBatch
from whiflash_agents.batch.plan import plan_rows
from whiflash_agents.chat import Chat
from whiflash_agents.models import resolve_model
from whiflash_agents.settings import Settings
from whiflash_agents.traces import Message, read_traces

ARMS: dict[str, dict[str, Any]] = {
    "none": {"router": "none"},
    "lookup": {"router": "lookup", "recorded_drafts": False},
    "lookup + recorded": {"router": "lookup", "recorded_drafts": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--target")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("-o", "--output", help="write the figures as JSON")
    args = parser.parse_args()

    distinct = distinct_positions(args)
    figures: dict[str, Any] = {}
    outputs: dict[str, dict[str, list[int]]] = {}
    for arm, options in ARMS.items():
        settings = Settings.of(
            workers=0,
            target=args.target,
            limit=args.limit,
            max_tokens=args.max_tokens,
            dtype=args.dtype,
            concurrency=args.concurrency,
            **options,
        )
        batch = WhiFlashBatch(settings)
        rows = list(batch.rows(args.traces))
        outputs[arm] = {r["custom_id"]: r["whiflash"]["token_ids"] for r in rows if not r["error"]}
        (engine,) = (e["engine"] for e in batch.figures.engines)
        rounds = sum(
            r["whiflash"]["speculative_decoding"]["num_spec_steps"] for r in rows if not r["error"]
        )
        tokens = sum(map(len, outputs[arm].values()))
        figures[arm] = {
            "rows": len(rows),
            "failed": [f"{r['custom_id']}: {r['error']['message']}" for r in rows if r["error"]],
            "seconds": round(batch.figures.running_seconds, 1),
            "tokens": tokens,
            "tokens_per_second": round(tokens / batch.figures.running_seconds, 1),
            "mean_acceptance_length": round((tokens - len(outputs[arm])) / rounds, 3),
            "positions_prefilled": engine["positions_prefilled"],
            "distinct_positions": distinct,
            "prefilled_per_distinct": round(engine["positions_prefilled"] / distinct, 4),
            "preemptions": engine["preemptions"],
            "identical_to_none": outputs[arm] == outputs["none"],
        }
        print(f"{arm}: {json.dumps(figures[arm], indent=2)}", flush=True)
    if args.output:
        Path(args.output).write_text(json.dumps(figures, indent=2) + "\n")


def distinct_positions(args: argparse.Namespace) -> int:
    """Nodes of the trie of all prompts: what must be prefilled at least once."""
    files = resolve_model(args.target)
    chat = Chat.from_pretrained(
        files.path, chat_template=files.chat_template, response_template=files.response_template
    )
    prompts = []
    for plan in plan_rows(read_traces(args.traces, limit=args.limit), "replay", seed=0, params={}):
        for row in plan.rows:
            messages = [Message.model_validate(m) for m in row.messages]
            prompts.append(chat.prompt_ids(messages, row.tools))
    prompts.sort()
    total, previous = 0, list[int]()
    for prompt in prompts:
        shared = 0
        while shared < min(len(prompt), len(previous)) and prompt[shared] == previous[shared]:
            shared += 1
        total += len(prompt) - shared
        previous = prompt
    print(
        f"{len(prompts)} prompts, {sum(map(len, prompts))} positions, {total} distinct", flush=True
    )
    return total


if __name__ == "__main__":
    main()
