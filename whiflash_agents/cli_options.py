"""What the commands share: the options that set fields of `Settings`, progress, and how they fail.

Like `cli.py`, it imports nothing that is slow to import before a command runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import click

from whiflash_agents.engine.errors import WhiFlashError

if TYPE_CHECKING:
    from rich.console import Console

    from whiflash_agents.batch import Progress

EXIT_FAILED_ROWS = 1
EXIT_USAGE = 2


def _setting(*names: str, **attributes: Any) -> Callable[[Any], Any]:
    """An option that sets a field of `Settings`. Unset it is None, so that environment, file and
    default apply; `shown` is that default, for the help."""
    shown = attributes.pop("shown", None)
    if shown is not None:
        attributes["help"] += f"  [default: {shown}]"
    return click.option(*names, default=None, **attributes)


_RUN_SETTINGS = [
    _setting(
        "--mode",
        type=click.Choice(["replay", "continue"]),
        shown="replay",
        help="replay: regenerate every assistant turn from the recorded history before it. "
        "continue: write the next assistant turn after the last message, whoever wrote that.",
    ),
    _setting(
        "--router",
        metavar="NAME",
        shown="auto",
        help="How drafts are made: auto (cost-aware if the target has neural drafters, else "
        "lookup), none (plain decoding), lookup (from the prompt, the output so "
        "far and the recorded turn), eagle3 (needs --eagle3), dflash or ddtree (need --dflash); or "
        "chosen anew every round: entropy or neural (between eagle3 and dflash), cost-aware (among "
        "none, lookup and all drafters given). It never changes what is generated.",
    ),
    _setting(
        "--eagle3",
        metavar="PATH",
        help="Folder or Hugging Face name of an EAGLE-3 drafter that was trained for the target.",
    ),
    _setting(
        "--dflash",
        metavar="PATH",
        help="Folder or Hugging Face name of a DFlash drafter that was trained for the target.",
    ),
    _setting(
        "--target",
        metavar="MODEL",
        help="Model folder or Hugging Face name.  [default: the embedded agent]",
    ),
    _setting(
        "--adapter",
        metavar="FOLDER",
        help="A low-rank adapter (PEFT) to merge into the target when it is loaded.",
    ),
    _setting(
        "--workers",
        metavar="N",
        type=int,
        shown="1",
        help="Ray actors with one engine each, which share the GPUs or CPU cores; 0 decodes in "
        "this process, without Ray.",
    ),
    _setting(
        "--concurrency",
        metavar="N",
        type=int,
        shown="8",
        help="Sequences decoded at once, per engine.",
    ),
    _setting("--max-tokens", metavar="N", type=int, shown="512", help="Longest turn, in tokens."),
    _setting(
        "--min-tokens",
        metavar="N",
        type=int,
        shown="0",
        help="No end of turn before N tokens.",
    ),
    _setting(
        "--temperature",
        metavar="X",
        type=float,
        shown="0",
        help="0 always takes the likeliest token.",
    ),
    _setting("--top-p", metavar="X", type=float, shown="1", help="Nucleus sampling; 1 is off."),
    _setting("--top-k", metavar="N", type=int, shown="0", help="The N likeliest tokens; 0 is off."),
    _setting(
        "--min-p",
        metavar="X",
        type=float,
        shown="0",
        help="Tokens at least X times as likely as the likeliest; 0 is off.",
    ),
    _setting(
        "--repetition-penalty",
        metavar="X",
        type=float,
        shown="1",
        help="Divides the logits of tokens in prompt and output; 1 is off.",
    ),
    _setting(
        "--presence-penalty",
        metavar="X",
        type=float,
        shown="0",
        help="Taken off the logits of tokens that the output holds.",
    ),
    _setting(
        "--frequency-penalty",
        metavar="X",
        type=float,
        shown="0",
        help="The same, times how often the output holds them.",
    ),
    _setting(
        "--stop",
        metavar="TEXT",
        multiple=True,
        help="End the turn before this text; may be given more than once.",
    ),
    _setting(
        "--ignore-eos/--no-ignore-eos",
        help="Go on after the model's end of turn, up to --max-tokens (for measurements).",
    ),
    _setting("--logprobs/--no-logprobs", help="Rows carry the log-probability of every token."),
    _setting(
        "--top-logprobs",
        metavar="N",
        type=int,
        shown="0",
        help="With --logprobs: the N likeliest tokens at every place as well.",
    ),
    _setting(
        "--seed",
        metavar="N",
        type=int,
        shown="0",
        help="Each row draws from a seed made of this one and the row's id.",
    ),
    _setting("--device", metavar="NAME", shown="auto", help="auto, cpu, cuda, cuda:N or mps."),
    _setting(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        shown="auto",
        help="auto: bfloat16 on a GPU, float32 on a CPU.",
    ),
    _setting("--limit", metavar="N", type=int, help="Read the first N traces only."),
    _setting(
        "--format",
        metavar="NAME",
        help="Format of the traces.  [default: recognised by content]",
    ),
    _setting(
        "--recorded-drafts/--no-recorded-drafts",
        shown="on",
        help="Whether --router lookup may draft from the recorded turn that a row replays.",
    ),
    _setting(
        "--entropy-threshold",
        metavar="X",
        type=float,
        shown="as calibrated, else 0.5",
        help="Nats of the target's next-token entropy above which router entropy takes eagle3.",
    ),
    _setting(
        "--router-weights",
        metavar="FILE",
        help="A trained router, for the routers neural and cost-aware.",
    ),
    _setting(
        "--exploration",
        metavar="X",
        type=float,
        shown="0.006",
        help="Share of the time that router cost-aware may lose by trying other arms.",
    ),
    _setting(
        "--recalibrate/--no-recalibrate",
        help="Measure what drafting and verifying cost anew, though it is known for this machine.",
    ),
    _setting(
        "--verify-budget",
        type=click.Choice(["auto", "all", "gain"]),
        shown="auto",
        help="all: verify whole drafts. gain: only as far as it pays. auto: gain with cost-aware.",
    ),
    _setting("--eagle3-depth", metavar="N", type=int, shown="8", help="Levels of an EAGLE-3 tree."),
    _setting(
        "--eagle3-top-k",
        metavar="N",
        type=int,
        shown="10",
        help="Nodes of a level that are expanded; 1 makes a chain.",
    ),
    _setting(
        "--eagle3-tokens", metavar="N", type=int, shown="60", help="Nodes of an EAGLE-3 tree."
    ),
    _setting("--ddtree-nodes", metavar="N", type=int, shown="32", help="Nodes of a ddtree."),
    _setting(
        "--max-draft-nodes",
        metavar="N",
        type=int,
        shown="64",
        help="Most drafted tokens verified per sequence and round.",
    ),
    _setting(
        "--catch-up",
        type=click.Choice(["lazy", "eager"]),
        shown="lazy",
        help="lazy: a neural drafter catches up when it is chosen. eager: after every round.",
    ),
    _setting(
        "--draft-prefill",
        type=click.Choice(["kv-only", "full"]),
        shown="kv-only",
        help="What a neural drafter computes of tokens that it missed.",
    ),
    _setting(
        "--max-backlog",
        metavar="N",
        type=int,
        shown="512",
        help="Tokens that a neural drafter may miss before it catches up unasked.",
    ),
    _setting(
        "--kv-tokens",
        metavar="N",
        type=int,
        help="Token positions in an engine's KV cache.  [default: by free memory]",
    ),
    _setting(
        "--prefill-chunk",
        metavar="N",
        type=int,
        shown="256",
        help="Prompt tokens computed per step, beside the decoding of others.",
    ),
    _setting(
        "--rounds/--no-rounds",
        help="Rows carry one record per decoding round: position, drafter, tokens, times.",
    ),
]


# What `bench`, `calibrate` and `train` do not take of `run`'s options: they use all drafters given,
# row by row, in one process.
_NOT_IN_STUDIES = {"router", "workers", "concurrency", "rounds"}
STUDY_SETTINGS = tuple(
    parameter.name
    for option in _RUN_SETTINGS
    for parameter in option(lambda: None).__click_params__
    if parameter.name not in _NOT_IN_STUDIES
)


def settings_options(*only: str) -> Callable[[Any], Any]:
    """The options of `run`, or those of them that set the fields named."""

    def add(command: Any) -> Any:
        for option in reversed(_RUN_SETTINGS):
            probe = option(lambda: None).__click_params__[0]
            if not only or probe.name in only:
                command = option(command)
        return command

    return add


def fail(error: WhiFlashError, status: int) -> NoReturn:
    click.echo(f"whiflash-batch: error: {error}", err=True)
    sys.exit(status)


def table_console(*, stderr: bool) -> Console:
    """Where tables go: as wide as the terminal or COLUMNS says, else wide enough for paths."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    known = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(stderr=stderr, width=None if known else 140)


def progress_for(quiet: bool, output: str) -> Progress:
    from whiflash_agents.batch.progress import BarProgress, LineProgress, SilentProgress

    if quiet:
        return SilentProgress()
    rows_on_terminal = output == "-" and sys.stdout.isatty()  # a bar would be torn by them
    return BarProgress() if sys.stderr.isatty() and not rows_on_terminal else LineProgress()
