"""Train the low-rank adapter that makes the default target a small agent.

    python examples/default_agent/train_adapter.py data/train.jsonl -o adapter

It learns the recorded turns of the traces, tokens of prompts left out, and can be stopped (Ctrl-C)
and started again: it goes on from the newest checkpoint in OUTPUT/training.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from whiflash_agents.chat import Chat
from whiflash_agents.engine.adapter import save_adapter
from whiflash_agents.engine.training.adapter import AdapterObjective, LowRankAdapter
from whiflash_agents.engine.training.loop import StepReport, TrainingLoop
from whiflash_agents.engine.training.schedule import TrainSettings
from whiflash_agents.models import resolve_model
from whiflash_agents.settings import load_settings
from whiflash_agents.training_texts import TextSet, recorded_texts


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--target", default="SmolLM2-135M-Instruct", help="what is adapted")
    parser.add_argument("--held-out", type=Path, help="traces that the loss is told of")
    parser.add_argument("--held-out-limit", type=int, default=60)
    parser.add_argument("--limit", type=int, help="traces of each file")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--alpha", type=float, default=32.0)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--texts-per-batch", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--max-length", type=int, default=1200)
    parser.add_argument("--minutes", type=float, help="stop with a checkpoint after this time")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def read(paths: list[Path], chat: Chat, limit: int | None, max_length: int) -> TextSet:
    return recorded_texts(
        paths, load_settings({"limit": limit, "workers": 0}), chat, max_length=max_length
    )


def main() -> None:
    args = parse_args()
    files = resolve_model(args.target)
    chat = Chat.from_pretrained(
        files.path, chat_template=files.chat_template, response_template=files.response_template
    )
    found = read(args.traces, chat, args.limit, args.max_length)
    held_out = (
        read([args.held_out], chat, args.held_out_limit, args.max_length).texts
        if args.held_out
        else []
    )
    print(
        f"{len(found.texts)} texts with {found.num_response_tokens:,} response tokens; left out: "
        f"{dict(found.left_out)}; held out: {len(held_out)} texts",
        flush=True,
    )
    model = AutoModelForCausalLM.from_pretrained(
        files.path, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    adapter = LowRankAdapter(model, args.rank, args.alpha, args.seed)
    settings = TrainSettings(
        epochs=args.epochs,
        texts_per_batch=args.texts_per_batch,
        peak_learning_rate=args.learning_rate,
        seed=args.seed,
        max_minutes=args.minutes,
    )
    told = time.monotonic()

    def on_step(report: StepReport) -> None:
        nonlocal told
        if report.step in (1, report.total) or time.monotonic() - told >= 30.0:
            told = time.monotonic()
            print(
                f"step {report.step} of {report.total}: loss {report.loss:.4f}, accuracy "
                f"{report.figures['accuracy']:.3f}, {report.texts_per_second:.2f} texts/s, "
                f"{report.seconds_left / 60:.0f} min left",
                flush=True,
            )

    loop = TrainingLoop(
        AdapterObjective(model, adapter),
        found.texts,
        settings,
        args.output / "training",
        identity={"target": files.name, "rank": args.rank, "alpha": args.alpha},
        held_out=held_out,
        on_step=on_step,
        on_held_out=lambda step, tally: print(f"held out: {tally.as_dict()}", flush=True),
    )
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: loop.stop())
    done = loop.run()
    if not done.finished:
        sys.exit(f"stopped after step {done.step} of {done.total}; the same command goes on")
    pairs = adapter.named_pairs()
    half = {name: (a.to(torch.bfloat16), b.to(torch.bfloat16)) for name, (a, b) in pairs.items()}
    save_adapter(half, args.alpha, args.output, base=files.name)
    (args.output / "training.json").write_text(
        json.dumps(
            {
                "texts": len(found.texts),
                "response_tokens": found.num_response_tokens,
                "settings": settings.decisive(),
                "rank": args.rank,
                "alpha": args.alpha,
                "seconds": round(done.seconds),
                "loss": done.loss,
                "figures": done.figures,
                "held_out": done.history,
            },
            indent=2,
        )
        + "\n",
        encoding="utf-8",
    )
    print(f"written to {args.output} after {done.seconds / 60:.1f} minutes of training")


if __name__ == "__main__":
    main()
