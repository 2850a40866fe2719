"""Speed of the engine on a target, as ratios: both sides interleaved in one run, medians.

    python benchmarks/speed.py                     the embedded default, bfloat16

Measures plain decoding against transformers' `generate` (dynamic and static cache), eight
concurrent sequences against one, `lookup` with recorded turns against plain decoding on a replay
that the target reproduces, and how much of a round is not the target's forward.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from whiflash_agents.batch.plan import plan_rows
from whiflash_agents.chat import Chat
from whiflash_agents.engine import EngineSettings, Request, SamplingParams, Target, WhiFlashEngine
from whiflash_agents.models import resolve_model
from whiflash_agents.traces import Message, read_traces

TRACES = Path(__file__).parents[1] / "examples" / "traces.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", help="model folder or hub name; the embedded default if absent")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=96, help="generated per request")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--traces", default=str(TRACES))
    parser.add_argument("-o", "--output", help="write the figures as JSON")
    args = parser.parse_args()

    files = resolve_model(args.target)
    target = Target.load(files.path, dtype=args.dtype)
    chat = Chat.from_pretrained(
        files.path, chat_template=files.chat_template, response_template=files.response_template
    )
    prompts = trace_prompts(chat, args.traces)
    figures: dict[str, Any] = {
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
        "target": files.name,
        "dtype": args.dtype,
    }
    figures["plain_vs_generate"] = plain_vs_generate(target, files.path, prompts, args)
    show(figures)
    figures["eight_vs_one"] = eight_vs_one(target, prompts, args)
    show(figures)
    figures["recorded_lookup_vs_plain"] = recorded_lookup_vs_plain(target, prompts, args)
    show(figures)
    figures["overhead"] = overhead(target, prompts, args)
    show(figures)
    if args.output:
        Path(args.output).write_text(json.dumps(figures, indent=2) + "\n")


def show(figures: dict[str, Any]) -> None:
    key = list(figures)[-1]
    print(f"{key}: {json.dumps(figures[key], indent=2)}", flush=True)


def trace_prompts(chat: Chat, path: str) -> list[list[int]]:
    """Prompts of every assistant turn of the traces."""
    prompts = []
    for plan in plan_rows(read_traces([path]), "replay", seed=0, params={}):
        for row in plan.rows:
            messages = [Message.model_validate(m) for m in row.messages]
            prompts.append(chat.prompt_ids(messages, row.tools))
    return prompts


def sampling(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(max_tokens=args.tokens, ignore_eos=True)


def seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def interleave(sides: dict[str, Callable[[], float]], repeat: int) -> dict[str, list[float]]:
    """Time every side once per repetition, after one warm-up round."""
    for side in sides.values():
        side()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeat):
        for name, side in sides.items():
            times[name].append(side())
    return times


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Median of the repetitions' own ratios."""
    return round(median(a / b for a, b in zip(slow, fast, strict=True)), 3)


def decode_seconds(engine: WhiFlashEngine, requests: list[Request]) -> float:
    """Seconds from the first token of the last request to start until all have ended."""
    for request in requests:
        engine.add(request)
    first: set[str] = set()
    started = 0.0
    while engine.has_work:
        first.update(e.id for e in engine.step() if e.token_ids)
        if not started and len(first) == len(requests):
            started = time.perf_counter()
    return time.perf_counter() - started


def plain_vs_generate(
    target: Target, path: Path, prompts: list[list[int]], args: argparse.Namespace
) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(str(path), dtype=getattr(torch, args.dtype)).eval()
    ids = torch.tensor([prompts[0]])
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": args.tokens,
        "min_new_tokens": args.tokens,
        "do_sample": False,
    }

    def plain() -> float:
        engine = WhiFlashEngine(target, settings=EngineSettings(max_running=1, kv_tokens=8192))
        return seconds(lambda: engine.generate([Request("a", prompts[0], sampling(args))]))

    def dynamic() -> float:
        return seconds(lambda: peer.generate(ids, **options))

    def static() -> float:
        return seconds(
            lambda: peer.generate(
                ids, cache_implementation="static", disable_compile=True, **options
            )
        )

    times = interleave({"plain": plain, "dynamic": dynamic, "static": static}, args.repeat)
    fastest = min(("dynamic", "static"), key=lambda name: median(times[name]))
    return {
        "prompt_tokens": len(prompts[0]),
        "ms_per_token": {k: round(median(v) / args.tokens * 1e3, 1) for k, v in times.items()},
        "faster_generate": fastest,
        "speedup": ratio(times[fastest], times["plain"]),
    }


def eight_vs_one(
    target: Target, prompts: list[list[int]], args: argparse.Namespace
) -> dict[str, Any]:
    def run(n: int) -> float:
        engine = WhiFlashEngine(target, settings=EngineSettings(max_running=n, kv_tokens=16384))
        return decode_seconds(
            engine, [Request(str(i), prompts[i], sampling(args)) for i in range(n)]
        )

    times = interleave({"one": lambda: run(1), "eight": lambda: run(8)}, args.repeat)
    one = [args.tokens / t for t in times["one"]]
    eight = [8 * args.tokens / t for t in times["eight"]]
    return {
        "tokens_per_second": {"one": round(median(one), 1), "eight": round(median(eight), 1)},
        "ratio": ratio(eight, one),
    }


def recorded_lookup_vs_plain(
    target: Target, prompts: list[list[int]], args: argparse.Namespace
) -> dict[str, Any]:
    chosen = prompts[:6]

    def engine(router: str) -> WhiFlashEngine:
        settings = EngineSettings(max_running=1, kv_tokens=16384)
        return WhiFlashEngine(target, router=router, settings=settings)

    recording = engine("none").generate(
        [Request(str(i), p, sampling(args)) for i, p in enumerate(chosen)]
    )

    def run(router: str) -> tuple[float, float, list[list[int]], float]:
        runner = engine(router)
        requests = [
            Request(r.id, p, sampling(args), r.token_ids)
            for r, p in zip(recording, chosen, strict=True)
        ]
        whole = time.perf_counter()
        results = runner.generate(requests)
        whole = time.perf_counter() - whole
        rounds = [record for r in results for record in r.stats.rounds]
        length = sum(r.emitted for r in rounds) / len(rounds)
        decoding = sum(r.round_seconds for r in rounds)
        return decoding, whole, [r.token_ids for r in results], length

    run("none")
    sides: dict[str, list[tuple[float, float, list[list[int]], float]]] = {"none": [], "lookup": []}
    for _ in range(args.repeat):
        for name, side in sides.items():
            side.append(run(name))
    same = [a == b for a, b in zip(sides["none"][0][2], sides["lookup"][0][2], strict=True)]
    return {
        "rows": len(chosen),
        "rows_identical_in_this_dtype": sum(same),
        "mean_acceptance_length": round(sides["lookup"][0][3], 2),
        "speedup_decoding": ratio([s[0] for s in sides["none"]], [s[0] for s in sides["lookup"]]),
        "speedup_with_prefill": ratio(
            [s[1] for s in sides["none"]], [s[1] for s in sides["lookup"]]
        ),
    }


def overhead(target: Target, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Share of decoding steps that is not the target's forward."""
    shares: dict[str, Any] = {}
    for router in ("none", "lookup"):
        for n in (1, 8):
            settings = EngineSettings(max_running=n, kv_tokens=16384)
            engine = WhiFlashEngine(target, router=router, settings=settings)
            for i in range(n):
                engine.add(Request(str(i), prompts[i], sampling(args)))
            first: set[str] = set()
            while len(first) < n:
                first.update(e.id for e in engine.step() if e.token_ids)
            step, forward = engine.totals.step_seconds, engine.totals.forward_seconds
            steps = engine.totals.steps
            while engine.num_running == n:
                engine.step()
            step = engine.totals.step_seconds - step
            forward = engine.totals.forward_seconds - forward
            steps = engine.totals.steps - steps
            shares[f"{router}, batch {n}"] = {
                "round_ms": round(step / steps * 1e3, 2),
                "outside_forward_ms": round((step - forward) / steps * 1e3, 2),
                "share": round((step - forward) / step, 4),
            }
    return shares


if __name__ == "__main__":
    main()
