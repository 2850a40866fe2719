"""Replay recorded traces with every drafter at once: same tokens, each position prefilled once.

    python benchmarks/replay.py ../shared/data/traces/tau_airline.json --limit 20 --shards 2

Every row is generated three times in one engine, interleaved: plainly, with `lookup`, and with
`lookup` that also knows the recorded turn. The arms share prefilled prompts, as any two rows do.
`--shards` splits the traces over processes with one thread each. Prints, per shard and in all, the
rows, the acceptance per arm, whether token ids are identical, and positions prefilled per distinct
prompt position.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whiflash_agents.batch.plan import plan_rows
from whiflash_agents.engine.routing.base import Router
from whiflash_agents.models import resolve_model
from whiflash_agents.traces import Message, Trace, read_traces

ARMS = ("none", "lookup", "recorded")


class RouterByRequest(Router):
    """The arm stands in the request's id, behind a bar."""

    name = "by request"
    arms = ("lookup", "recorded")

    def route(self, sequences: Sequence[Any]) -> list[str]:
        return [s.id.rpartition("|")[2] for s in sequences]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--target")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("-o", "--output", help="write the figures as JSON")
    args = parser.parse_args()

    traces = list(read_traces(args.traces, limit=args.limit))
    resolve_model(args.target)  # before the shards ask for it all at once
    shares = [(share, args, i) for i, share in enumerate(split(traces, args.shards))]
    with multiprocessing.get_context("spawn").Pool(args.shards) as pool:
        parts = pool.starmap(replay, shares)
    figures = combine(parts)
    print(json.dumps(figures, indent=2))
    if args.output:
        Path(args.output).write_text(json.dumps(figures, indent=2) + "\n")


def split(traces: Sequence[Trace], shards: int) -> list[list[Trace]]:
    """Shares of about equal work: the costliest trace first, each to the lightest share."""

    def cost(trace: Trace) -> int:
        return len(trace.model_dump_json()) * len(trace.assistant_turns)

    shares: list[list[Trace]] = [[] for _ in range(shards)]
    for trace in sorted(traces, key=cost, reverse=True):
        min(shares, key=lambda share: sum(map(cost, share))).append(trace)
    return shares


def replay(traces: list[Trace], args: argparse.Namespace, shard: int) -> dict[str, Any]:
    """All arms of all rows of `traces` through one engine."""
    import torch

    from whiflash_agents.chat import Chat
    from whiflash_agents.engine import (
        EngineSettings,
        Request,
        SamplingParams,
        Target,
        WhiFlashEngine,
    )
    from whiflash_agents.engine.drafters.lookup import LookupDrafter

    if args.shards > 1:
        torch.set_num_threads(1)
    files = resolve_model(args.target)
    chat = Chat.from_pretrained(
        files.path, chat_template=files.chat_template, response_template=files.response_template
    )
    target = Target.load(files.path, dtype=args.dtype)
    # No index over finished rows: an arm must not draft from what another arm made of its row.
    drafters = {name: LookupDrafter(shared_tokens=0) for name in RouterByRequest.arms}
    engine = WhiFlashEngine(
        target,
        router=RouterByRequest(),
        drafters=drafters,
        settings=EngineSettings(max_running=9, kv_tokens=100_000, prefill_chunk=512),
    )
    waiting: list[Request] = []
    prompts: list[list[int]] = []
    too_long: list[str] = []
    sampling = SamplingParams(max_tokens=args.max_tokens)
    for plan in plan_rows(traces, "replay", seed=0, params={}):
        for row in plan.rows:
            messages = [Message.model_validate(m) for m in row.messages]
            prompt = chat.prompt_ids(messages, row.tools)
            if len(prompt) + args.max_tokens > target.max_context:
                too_long.append(row.id)
                continue
            prompts.append(prompt)
            recorded = chat.turn_ids(messages, row.tools, Message.model_validate(row.recorded))
            for arm in ARMS:
                ids = recorded if arm == "recorded" else ()
                waiting.append(Request(f"{row.id}|{arm}", prompt, sampling, ids))
    waiting.reverse()
    total = len(waiting)

    outputs: dict[str, dict[str, list[int]]] = {arm: {} for arm in ARMS}
    rounds = dict.fromkeys(ARMS, 0)
    failed: list[str] = []
    started = told = time.perf_counter()
    while waiting or engine.has_work:
        while waiting and engine.num_running + engine.num_waiting < 9:
            engine.add(waiting.pop())
        for event in engine.step():
            result = event.result
            if result is None:
                continue
            row_id, _, arm = result.id.rpartition("|")
            outputs[arm][row_id] = result.token_ids
            rounds[arm] += result.stats.num_spec_steps
            if result.finish_reason not in ("stop", "length"):
                failed.append(f"{result.id}: {result.error}")
        if time.perf_counter() - told > 60:
            told = time.perf_counter()
            done = sum(map(len, outputs.values()))
            same = {arm: identical(outputs, arm) for arm in ARMS[1:]}
            seconds = f"{told - started:.0f} s"
            print(f"shard {shard}: {done} of {total} after {seconds}, same: {same}", flush=True)
    return {
        "rows": len(prompts),
        "rows_beyond_context": too_long,
        "seconds": time.perf_counter() - started,
        "failed": failed,
        "prompt_positions": sum(map(len, prompts)),
        "distinct_positions": distinct_positions(prompts),
        "positions_prefilled": engine.totals.positions_prefilled,
        "preemptions": engine.totals.preemptions,
        "tokens": {arm: sum(map(len, o.values())) for arm, o in outputs.items()},
        "rounds": rounds,
        "rows_identical_to_none": {arm: identical(outputs, arm)[0] for arm in ARMS},
    }


def identical(outputs: dict[str, dict[str, list[int]]], arm: str) -> tuple[int, int]:
    """Rows whose token ids equal plain decoding's, and rows that both arms have finished."""
    both = [key for key in outputs[arm] if key in outputs["none"]]
    return sum(outputs[arm][key] == outputs["none"][key] for key in both), len(both)


def distinct_positions(prompts: Sequence[list[int]]) -> int:
    """Nodes of the trie of all prompts: what must be prefilled at least once."""
    total, previous = 0, list[int]()
    for prompt in sorted(prompts):
        shared = 0
        while shared < min(len(prompt), len(previous)) and prompt[shared] == previous[shared]:
            shared += 1
        total += len(prompt) - shared
        previous = prompt
    return total


def combine(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    summed = ("rows", "prompt_positions", "distinct_positions", "positions_prefilled")
    figures: dict[str, Any] = {key: sum(p[key] for p in parts) for key in summed}
    figures["seconds"] = round(max(p["seconds"] for p in parts), 1)
    figures["rows_beyond_context"] = [row for p in parts for row in p["rows_beyond_context"]]
    figures["failed"] = [text for p in parts for text in p["failed"]]
    figures["preemptions"] = sum(p["preemptions"] for p in parts)
    figures["prefilled_per_distinct"] = round(
        figures["positions_prefilled"] / figures["distinct_positions"], 4
    )
    for key in ("tokens", "rounds", "rows_identical_to_none"):
        figures[key] = {arm: sum(p[key][arm] for p in parts) for arm in ARMS}
    figures["mean_acceptance_length"] = {
        arm: round((figures["tokens"][arm] - figures["rows"]) / figures["rounds"][arm], 3)
        for arm in ARMS
    }
    return figures


if __name__ == "__main__":
    main()
