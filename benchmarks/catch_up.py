"""What switching drafters costs: catching up, lazily and eagerly, on a target of random weights.

    python benchmarks/catch_up.py                  a Qwen3 of 12 layers, float32
    python benchmarks/catch_up.py --layers 28 --dflash-layers 5        the shape of Qwen3-0.6B
    python benchmarks/catch_up.py --markdown       the tables for docs/drafters.md
    python benchmarks/catch_up.py --small          tiny widths, a few seconds, to try it out

Behind `--context` positions B more are committed, `--accepted` of them per round. Times are those
of `CatchUp.consume`:

- *lazy*: the drafter was not chosen meanwhile; one call consumes the backlog of all B positions
  (which is checked);
- *eager*: each of the B / `--accepted` rounds (one for a smaller B) consumed what it had committed;
  the sum over these calls. A round's calls for all drafters follow one another, as in the engine;
- *kv-only* and *full*: the engine's `draft_prefill`. Full runs EAGLE-3's whole layer over the rows;
  DFlash's context has nothing more to run, so it is measured once.

In the engine the target's forward lies between any two rounds and drives the drafters' weights out
of the caches; so all weights of the target are read before every call (eager: before every round's
calls). A share is of one *round*: drafting and verifying behind `--context` positions with that
drafter, less its catching up, as the engine records it. Random drafters are hardly ever right; none
of these times depends on that. All variants are interleaved within a repetition, after one to warm
up; figures are medians, and ratios the medians of the repetitions' own.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from whiflash_agents.engine import EngineSettings, Request, SamplingParams, Target, WhiFlashEngine
from whiflash_agents.engine.catch_up import CatchUp
from whiflash_agents.engine.drafters.base import Drafter
from whiflash_agents.engine.drafters.context import draft_context
from whiflash_agents.engine.drafters.dflash import DFlashDrafter
from whiflash_agents.engine.drafters.dflash_model import DFlashConfig, DFlashModel
from whiflash_agents.engine.drafters.eagle3 import Eagle3Drafter
from whiflash_agents.engine.drafters.eagle3_model import Eagle3Config, Eagle3Model
from whiflash_agents.engine.drafters.layers import LayerConfig
from whiflash_agents.engine.features import FeatureBuffer
from whiflash_agents.engine.routing.base import Router
from whiflash_agents.engine.sequence import ContextState, SequenceState
from whiflash_agents.engine.telemetry import RoundRecord

ROUNDS = 2  # of each drafter, per repetition
BLOCK = 16  # slots of a DFlash block
TREES: dict[str, dict[str, int]] = {"tree": {}, "chain": {"top_k": 1, "total_tokens": 8}}
VARIANTS = tuple(product(("lazy", "eager"), ("kv-only", "full")))
RATIOS = {
    "eager / lazy": ("eager, kv-only", "lazy, kv-only"),
    "full / kv-only": ("lazy, full", "lazy, kv-only"),
}


class Cell(NamedTuple):
    """What one time is of."""

    drafter: str
    backlog: int
    catch_up: str
    draft_prefill: str


class ScriptedRouter(Router):
    """Serves the arm it is told to, and keeps hold of the sequences it was asked about."""

    name = "scripted"
    arms = ("eagle3", "dflash")

    def __init__(self) -> None:
        self.arm = "none"
        self.sequences: list[SequenceState] = []

    def route(self, sequences: Sequence[SequenceState]) -> list[str]:
        self.sequences = list(sequences)
        return [self.arm] * len(sequences)


class Models:
    """The target and the networks of its drafters, shared by all engines."""

    def __init__(self, args: argparse.Namespace, positions: int) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        shape = (128, 256, 8, 4, 2, 32) if args.small else (1024, 3072, args.layers, 16, 8, 128)
        layers = LayerConfig(*shape, max_positions=positions)
        depth, vocab = layers.num_layers, 1000 if args.small else 32_000
        torch.manual_seed(0)
        config = Qwen3Config(
            hidden_size=layers.hidden_size,
            intermediate_size=layers.intermediate_size,
            num_hidden_layers=depth,
            num_attention_heads=layers.num_heads,
            num_key_value_heads=layers.num_kv_heads,
            head_dim=layers.head_dim,
            vocab_size=vocab,
            max_position_embeddings=positions,
            tie_word_embeddings=True,
        )
        layer, features = replace(layers, num_layers=1), (2, depth // 2, depth - 3)
        eagle3 = Eagle3Config(layer, features, layers.hidden_size, vocab, vocab // 2)
        # As many features as draft layers, evenly spread, as in published checkpoints (5 of each
        # for targets of 36 layers).
        count = args.dflash_layers
        spread = tuple(2 + round(i * (depth - 4) / max(1, count - 1)) for i in range(count))
        own = replace(layers, num_layers=count)
        dflash = DFlashConfig(own, spread, vocab, depth, BLOCK, mask_token_id=vocab - 1)
        dtype = getattr(torch, args.dtype)
        model = Qwen3ForCausalLM(config).to(dtype)
        self.target = Target(model.requires_grad_(False), name="random weights")
        self._eagle3 = Eagle3Model(eagle3).to(dtype).eval().requires_grad_(False)
        self._dflash = DFlashModel(dflash).to(dtype).eval().requires_grad_(False)
        self.args = args

    def start(
        self, prompt: list[int], *, output: int, draft_prefill: str
    ) -> tuple[WhiFlashEngine, ScriptedRouter]:
        """An engine with both drafters, whose one sequence has its prompt behind it; neither
        drafter has consumed any of it."""
        router, length = ScriptedRouter(), len(prompt) + output
        drafters: dict[str, Drafter] = {
            "eagle3": Eagle3Drafter(self._eagle3, **TREES[self.args.eagle3]),
            "dflash": DFlashDrafter(self._dflash),
        }
        settings = EngineSettings(
            max_running=1, kv_tokens=length + 256, draft_prefill=draft_prefill, max_backlog=length
        )
        engine = WhiFlashEngine(self.target, router=router, drafters=drafters, settings=settings)
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        engine.add(Request("switching", prompt, sampling))
        while not router.sequences:
            engine.step()
        return engine, router

    def sweep(self) -> None:
        """Read the target's weights, as its forward does."""
        for weight in self.target.model.parameters():
            weight.sum()


def run_rounds(engine: WhiFlashEngine, router: ScriptedRouter, arm: str) -> list[RoundRecord]:
    """Whole rounds of the engine's one sequence."""
    router.arm = arm
    for _ in range(ROUNDS):
        engine.step()
    done = router.sequences[0].stats.rounds[-ROUNDS:]
    if any(record.drafter != arm for record in done):
        raise RuntimeError(f"expected {ROUNDS} rounds of {arm}, got {done}")
    return done


class Switching:
    """One engine's draft contexts over a sequence that is set back before every measurement.

    Args:
        drafters: whose contexts are measured; the others are taken to be up to date.
    """

    def __init__(
        self, models: Models, prompt: list[int], drafters: Sequence[str], *, draft_prefill: str
    ) -> None:
        engine, router = models.start(prompt, output=4, draft_prefill=draft_prefill)
        found = {name: draft_context(drafter) for name, drafter in engine.drafters.items()}
        self._contexts = {name: c for name, c in found.items() if c is not None}
        self._catch_up = CatchUp(self._contexts.values(), max_backlog=len(prompt))
        self._sequence = router.sequences[0]
        buffer, layers = self._sequence.features, self._catch_up.layers
        assert buffer is not None
        # As a forward returns them: [positions, layers, hidden].
        self._features = buffer.read(0, buffer.end, layers).unflatten(1, (len(layers), -1))
        self._sweep = models.sweep
        self._context, self._accepted = models.args.context, models.args.accepted
        self.drafters, self.draft_prefill = tuple(drafters), draft_prefill
        self._set_back(0)
        self._commit(self._context, self._contexts)
        for name in self._contexts:
            self._consume(name, self._context)

    def lazy(self, drafter: str, backlog: int) -> dict[Cell, float]:
        """Seconds of the one call that makes up for `backlog` positions."""
        self._set_back(self._context)
        for rows in per_round(backlog, self._accepted):
            self._commit(rows, [drafter])
        self._sweep()
        seconds = self._consume(drafter, backlog)
        return {Cell(drafter, backlog, "lazy", self.draft_prefill): seconds}

    def eager(self, backlogs: Sequence[int]) -> dict[Cell, float]:
        """Seconds of the calls of all rounds up to each of `backlogs`, all drafters."""
        self._set_back(self._context)
        spent, cells, done = dict.fromkeys(self.drafters, 0.0), {}, 0
        for rows in per_round(max(backlogs), self._accepted):
            self._commit(rows, self.drafters)
            done += rows
            self._sweep()
            for drafter in self.drafters:
                spent[drafter] += self._consume(drafter, rows)
                if done in backlogs:
                    cells[Cell(drafter, done, "eager", self.draft_prefill)] = spent[drafter]
        return cells

    def _set_back(self, length: int) -> None:
        self._sequence.num_cached = length
        self._sequence.contexts = {name: ContextState(length) for name in self._contexts}
        self._sequence.features = FeatureBuffer(self._catch_up.layers, length)

    def _commit(self, rows: int, behind: Iterable[str]) -> None:
        """The target computed the next positions; contexts `behind` did not follow, others did."""
        start = self._sequence.num_cached
        self._sequence.num_cached += rows
        for name in self._contexts.keys() - set(behind):
            self._sequence.contexts[name].rows = self._sequence.num_cached
        self._catch_up.append(self._sequence, self._features, range(start, start + rows))

    def _consume(self, drafter: str, rows: int) -> float:
        context = self._contexts[drafter]
        if (backlog := context.backlog(self._sequence)) != rows:
            raise RuntimeError(f"{drafter} lags behind {backlog} positions, expected {rows}")
        return self._catch_up.consume(context, [self._sequence])


def per_round(positions: int, accepted: int) -> list[int]:
    """Positions that each round commits until there are `positions`."""
    return [accepted] * (positions // accepted) or [positions]


def main() -> None:
    defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=defaults)
    parser.add_argument("--small", action="store_true", help="tiny widths, to try it out")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="of all weights"
    )
    parser.add_argument("--layers", type=int, default=12, help="of the target")
    parser.add_argument("--dflash-layers", type=int, default=2, help="and features of DFlash")
    parser.add_argument("--eagle3", default="tree", choices=tuple(TREES), help="shape of its draft")
    parser.add_argument("--context", type=int, default=1024, help="positions before the backlog")
    backlogs = [1, 64, 128, 512, 1024]
    parser.add_argument("--backlogs", type=int, nargs="+", default=backlogs, help="positions each")
    parser.add_argument("--accepted", type=int, default=4, help="positions that a round commits")
    parser.add_argument("--repeat", type=int, default=7, help="measured repetitions")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument("--markdown", action="store_true", help="print the tables in Markdown")
    if parser.parse_known_args()[0].small:
        parser.set_defaults(context=64, backlogs=[1, 16, 32], repeat=2, layers=8)
    args = parser.parse_args()
    args.backlogs = sorted(set(args.backlogs))
    if min(args.accepted, args.context, args.repeat, *args.backlogs) < 1:
        parser.error("--accepted, --context, --repeat and --backlogs must be 1 or more")
    if odd := [b for b in args.backlogs if b > args.accepted and b % args.accepted]:
        parser.error(f"--backlogs {odd[0]} is not a multiple of --accepted {args.accepted}")

    figures = measure(args)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    report(figures, markdown=args.markdown)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All variants once per repetition; all figures."""
    console = Console(stderr=True)
    with console.status("building the target and prefilling"):
        longest = args.context + max(args.backlogs)
        # Enough for all rounds, even if every draft were accepted.
        output = (args.repeat + 1) * ROUNDS * len(ScriptedRouter.arms) * (BLOCK + 1)
        models = Models(args, positions=longest + output + 256)
        prompt = random.Random(0).choices(range(models.target.vocab_size), k=longest)
        whole = models.start(prompt[: args.context], output=output, draft_prefill="kv-only")
        switching = [
            Switching(models, prompt, ["eagle3", "dflash"], draft_prefill="kv-only"),
            Switching(models, prompt, ["eagle3"], draft_prefill="full"),
        ]
    sides: list[Callable[[], dict[Cell, float]]] = []
    for backlog in args.backlogs:
        sides += [partial(s.lazy, d, backlog) for s in switching for d in s.drafters]
    # The rounds up to a backlog are the first of those up to a larger one, so they run once.
    groups = [[b] for b in args.backlogs if b < args.accepted]
    groups.append([b for b in args.backlogs if b >= args.accepted])
    sides += [partial(s.eager, group) for group in groups if group for s in switching]

    times: dict[Cell, list[float]] = defaultdict(list)
    records: dict[str, list[RoundRecord]] = {drafter: [] for drafter in ScriptedRouter.arms}
    columns = (TextColumn("steps"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=(args.repeat + 1) * (len(sides) + len(records)))
        for repetition in range(args.repeat + 1):
            for drafter, kept in records.items():
                done = run_rounds(*whole, drafter)
                kept += done if repetition else []
                progress.advance(task)
            for side in sides:
                for cell, seconds in side().items():
                    times[cell] += [seconds] if repetition else []
                progress.advance(task)
    target, told = models.target, ("dtype", "eagle3", "context", "accepted", "repeat")
    return {
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "target": f"{target.num_layers} layers, hidden {target.hidden_size:,}, "
        f"vocabulary {target.vocab_size:,}, DFlash of {args.dflash_layers} layers",
        **{name: getattr(args, name) for name in told},
        **summary(times, records, args.accepted),
    }


def summary(
    times: dict[Cell, list[float]], records: dict[str, list[RoundRecord]], accepted: int
) -> dict[str, Any]:
    """Rounds by drafter, and rows of cells and ratios by drafter and backlog."""
    rounds: dict[str, dict[str, float]] = {}
    for drafter, done in records.items():
        rounds[drafter] = {
            "drafted": median(r.drafted for r in done),
            "draft_ms": round(median(r.draft_seconds for r in done) * 1e3, 3),
            "round_ms": round(median(r.round_seconds - r.catch_up_seconds for r in done) * 1e3, 3),
        }
    rows = []
    for drafter, backlog in product(records, sorted({cell.backlog for cell in times})):
        calls = len(per_round(backlog, accepted))
        row: dict[str, Any] = {"drafter": drafter, "backlog": backlog, "eager_calls": calls}
        for variant in VARIANTS:
            if seconds := times.get(Cell(drafter, backlog, *variant)):
                milliseconds = median(seconds) * 1e3
                row[", ".join(variant)] = {
                    "ms": round(milliseconds, 3),
                    "share_of_round": round(milliseconds / rounds[drafter]["round_ms"], 4),
                    "all_ms": [round(s * 1e3, 3) for s in seconds],
                }
        for name, (slow, fast) in RATIOS.items():
            if slow in row and fast in row:
                pairs = zip(row[slow]["all_ms"], row[fast]["all_ms"], strict=True)
                row[name] = round(median(a / b for a, b in pairs), 3)
        rows.append(row)
    return {"rounds": rounds, "rows": rows}


def report(figures: dict[str, Any], *, markdown: bool) -> None:
    """Print the tables."""
    longest = {row["drafter"]: row for row in figures["rows"]}
    rounds = []
    for drafter, done in figures["rounds"].items():
        draft, whole = done["draft_ms"], done["round_ms"]
        each = longest[drafter]["eager, kv-only"]["ms"] / longest[drafter]["eager_calls"]
        times = [number(part) for part in (draft, whole - draft, whole)]
        eager = f"{number(each)} ({each / whole:.1%})"
        rounds.append([drafter, f"{done['drafted']:.0f}", *times, eager])
    headers = ["drafter", "drafted", "draft", "verify", "round", "eager catch-up per round"]
    show(f"One round behind {figures['context']:,} positions, ms", headers, rounds, markdown)

    cells = []
    for row in figures["rows"]:
        shown = [row["drafter"], f"{row['backlog']:,}"]
        for variant in VARIANTS:
            cell = row.get(", ".join(variant))
            shown.append(f"{number(cell['ms'])} ({cell['share_of_round']:.1%})" if cell else "same")
        shown += [f"{row[name]:.2f}" if name in row else "–" for name in RATIOS]
        cells.append(shown)
    headers = ["drafter", "backlog", *map(", ".join, VARIANTS), *RATIOS]
    show("Catching up, ms (share of one round)", headers, cells, markdown)
    print(
        "{dtype}, {threads} threads, torch {torch}; target: {target}; EAGLE-3 drafts a {eagle3}; "
        "eager: {accepted} positions per call; medians of {repeat} repetitions.".format(**figures)
    )


def number(value: float) -> str:
    """Three digits."""
    return f"{value:.2f}" if value < 10 else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def show(title: str, headers: list[str], rows: list[list[str]], markdown: bool) -> None:
    if markdown:
        print(f"{title}:\n")
        for row in (headers, ["---"] + ["---:"] * (len(headers) - 1), *rows):
            print(f"| {' | '.join(row)} |")
        print()
        return
    first, *others = headers
    columns = (Column(header, justify="right") for header in others)
    table = Table(first, *columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    # What is not a terminal gets 80 columns from rich, too few for these.
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
