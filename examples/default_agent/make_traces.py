"""Write the traces that the default agent is trained and evaluated on.

python examples/default_agent/make_traces.py --output data --bfcl cache
python examples/default_agent/make_traces.py --output data --train 200 --held-out 20

`--output` gets train.jsonl, held_out.jsonl (both in the `openai` format of docs/traces.md) and
gold.jsonl (what the held-out turns should call, for evaluate.py). The same options give the same
bytes. Traces with a prompt of more than `--max-prompt-tokens`, or a turn of more than
`--max-response-tokens`, are dropped from training.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import bfcl
import episodes
from catalogue import HELD_OUT_TOOLS, TOOLS, TRAINING_TOOLS
from chains import HELD_OUT_CHAINS, TRAINING_CHAINS
from conversation import Conversation
from gold import gold_of_trace

from whiflash_agents.chat import Chat
from whiflash_agents.models import resolve_model
from whiflash_agents.traces import FORMATS

_KINDS: dict[str, tuple[int, Callable[[Conversation], None]]] = {
    "single": (24, episodes.single),
    "two_tasks": (9, episodes.two_tasks),
    "parallel": (8, episodes.parallel),
    "mixed": (8, episodes.mixed),
    "follow_up": (5, episodes.follow_up),
    "retry": (6, episodes.retry),
    "explain": (4, episodes.explain),
    "mend": (4, episodes.mend),
    "clarify": (10, episodes.clarify),
    "no_tool": (9, episodes.no_tool),
    "chat": (4, episodes.chat),
}
_CHAIN_WEIGHT = 9
_HELD_OUT_KINDS = {"correction": (1, episodes.correction)}


def training_traces(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` traces of the training tools and phrasings."""
    kinds = _with_chains(TRAINING_CHAINS)
    return [
        _trace(f"train-{n:05d}", seed, kinds, TRAINING_TOOLS, TRAINING_TOOLS) for n in range(count)
    ]


def held_out_traces(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` traces of each of four parts.

    `seen`: drawn like the training data. `phrasing`: requests in wordings that were kept out.
    `domain`: tools of domains that were kept out. `kind`: a kind of conversation that was kept out.
    """
    seen = _with_chains(TRAINING_CHAINS)
    every = list(TOOLS.values())
    own = {
        name: kind for name, kind in seen.items() if name not in {"chat", "chain", "parallel"}
    }  # those have one set of wordings only
    made = []
    for n in range(count):
        made += [
            _trace(f"seen-{n:04d}", seed, seen, TRAINING_TOOLS, TRAINING_TOOLS),
            _trace(f"phrasing-{n:04d}", seed, own, TRAINING_TOOLS, TRAINING_TOOLS, fresh=True),
            _trace(f"domain-{n:04d}", seed, _with_chains(HELD_OUT_CHAINS), HELD_OUT_TOOLS, every),
            _trace(f"kind-{n:04d}", seed, _HELD_OUT_KINDS, TRAINING_TOOLS, TRAINING_TOOLS),
        ]
    return made


def _with_chains(chains: Sequence[Any]) -> dict[str, tuple[int, Callable[[Conversation], None]]]:
    return {
        **_KINDS,
        "chain": (_CHAIN_WEIGHT, partial(episodes.chain, chains=chains, tools=TOOLS)),
    }


def _trace(
    id: str,
    seed: int,
    kinds: dict[str, tuple[int, Callable[[Conversation], None]]],
    pool: Sequence[Any],
    others: Sequence[Any],
    fresh: bool = False,
) -> dict[str, Any]:
    """One trace; it depends on the seed and its id only."""
    rng = Random(f"{seed}:{id}")
    kind = rng.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
    conversation = Conversation(rng, pool, others, fresh)
    kinds[kind][1](conversation)
    part = id.split("-")[0]
    trace = {"id": id, "category": part, "kind": kind, "messages": conversation.messages}
    return trace | ({"tools": conversation.tools} if conversation.tools else {})


class Lengths:
    """Counts tokens as a target reads them; None is the embedded default."""

    def __init__(self, target: str | None) -> None:
        files = resolve_model(target)
        self._chat = Chat.from_pretrained(
            files.path,
            chat_template=files.chat_template,
            response_template=files.response_template,
        )

    def of(self, record: dict[str, Any]) -> list[tuple[int, int]]:
        """(tokens of the prompt, tokens of the response) of every assistant turn."""
        trace = FORMATS["openai"].parse(record, record["id"])
        messages = trace.messages
        return [
            (
                len(self._chat.prompt_ids(messages[:at], trace.tools)),
                len(self._chat.turn_ids(messages[:at], trace.tools, messages[at])),
            )
            for at in trace.assistant_turns
        ]


def statistics(records: Sequence[dict[str, Any]], lengths: Sequence[list[tuple[int, int]]]) -> str:
    """Traces, turns, and tokens of prompts and responses, as text."""
    turns = [turn for trace in lengths for turn in trace]
    lines = [f"{len(records)} traces, {len(turns)} assistant turns"]
    for name, index in (("prompt", 0), ("response", 1)):
        sizes = sorted(turn[index] for turn in turns)
        mean, p90 = sum(sizes) / len(sizes), sizes[int(0.9 * (len(sizes) - 1))]
        lines.append(f"  {name} tokens: mean {mean:.0f}, p90 {p90}, most {sizes[-1]}")
    counts = Counter(record["category"] for record in records)
    lines.append("  " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return "\n".join(lines)


def write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """One record a line."""
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the three files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=2500, help="traces written for training")
    parser.add_argument("--held-out", type=int, default=60, help="traces of each held-out part")
    parser.add_argument("--bfcl", type=Path, help="folder that keeps the wheel of bfcl-eval")
    parser.add_argument("--target", help="whose tokens are counted (default: the embedded model)")
    parser.add_argument("--max-prompt-tokens", type=int, default=900, help="in training")
    parser.add_argument("--max-response-tokens", type=int, default=400, help="in training")
    arguments = parser.parse_args()

    train = training_traces(arguments.train, arguments.seed)
    held_out = held_out_traces(arguments.held_out, arguments.seed)
    gold = [gold_of_trace(record, record["category"], record["kind"]) for record in held_out]
    if arguments.bfcl:
        made = bfcl.convert_wheel(bfcl.fetch_wheel(arguments.bfcl), arguments.seed)
        train += [example.trace for example in made.examples if not example.held_out]
        held_out += [example.trace for example in made.examples if example.held_out]
        gold += [example.gold for example in made.examples if example.held_out]
        for reason, count in sorted(made.left_out.items()):
            print(f"bfcl: {count} prompts left out: {reason}")

    counter = Lengths(arguments.target)
    sizes = {record["id"]: counter.of(record) for record in (*train, *held_out)}
    fits = [
        record
        for record in train
        if max(prompt for prompt, _ in sizes[record["id"]]) <= arguments.max_prompt_tokens
        and max(response for _, response in sizes[record["id"]]) <= arguments.max_response_tokens
    ]
    print(f"{len(train) - len(fits)} traces dropped from training: too many tokens")
    # Shuffled, so that any first part of a file is a sample of the whole.
    order = Random(f"{arguments.seed}:order")
    order.shuffle(fits)
    order.shuffle(held_out)
    arguments.output.mkdir(parents=True, exist_ok=True)
    write(arguments.output / "train.jsonl", fits)
    write(arguments.output / "held_out.jsonl", held_out)
    write(arguments.output / "gold.jsonl", gold)
    for name, records in (("train", fits), ("held_out", held_out)):
        print(f"{name}.jsonl: " + statistics(records, [sizes[r["id"]] for r in records]))


if __name__ == "__main__":
    main()
