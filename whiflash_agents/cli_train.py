"""The commands that train: `train eagle3`, `train dflash`, `train router`.

Like `cli.py`, it imports nothing that is slow to import before a command runs.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whiflash_agents.engine.errors import WhiFlashError

from .cli_interrupts import interrupts
from .cli_options import (
    EXIT_FAILED_ROWS,
    EXIT_USAGE,
    STUDY_SETTINGS,
    fail,
    progress_for,
    settings_options,
    table_console,
)
from .cli_train_options import drafter_options, options_from_elsewhere

if TYPE_CHECKING:
    from whiflash_agents.drafter_kinds import KindOptions
    from whiflash_agents.drafter_plan import TrainedDrafter
    from whiflash_agents.drafter_training import DrafterTraining
    from whiflash_agents.settings import Settings

# What training does not take of a study's options: there is no drafter yet, and no router.
NOT_IN_TRAINING = {
    *("eagle3", "dflash", "entropy_threshold", "router_weights", "exploration", "recalibrate"),
    *("verify_budget", "catch_up", "draft_prefill", "max_backlog", "logprobs", "top_logprobs"),
}
OF_EAGLE3 = {"eagle3_depth", "eagle3_top_k", "eagle3_tokens"}
_OF_DFLASH = {"ddtree_nodes"}


@click.group(
    epilog="""\b
Examples:
  whiflash-batch train eagle3 traces.jsonl -o drafters/eagle3 --target T
  whiflash-batch train dflash traces.jsonl -o drafters/dflash --target T
  whiflash-batch train router traces.jsonl -o router.safetensors --target T \\
      --eagle3 drafters/eagle3 --dflash drafters/dflash"""
)
def train() -> None:
    """Train drafters for a target, and what routes between them."""


@train.command(
    "eagle3",
    epilog="""\b
Examples:
  whiflash-batch train eagle3 traces.jsonl -o drafters/eagle3 --target T --dtype bfloat16
  whiflash-batch train eagle3 traces.jsonl -o drafters/eagle3 --no-regenerate --epochs 2

Exit status: 0 trained, 1 unfinished (time was up: the same command goes on), 2 usage, unreadable
input, or nothing to learn from, 130 interrupted by Ctrl-C, 143 by SIGTERM: the same command goes
on.""",
)
@drafter_options
@click.option(
    "--draft-vocab",
    type=int,
    metavar="N",
    help="Tokens that the drafter knows: those most frequent in the responses."
    "  [default: 16000, or all]",
)
@click.option(
    "--steps",
    type=int,
    default=7,
    show_default=True,
    metavar="N",
    help="Of training-time test: tokens that every chain drafts from its own outputs.",
)
@settings_options(*(n for n in STUDY_SETTINGS if n not in NOT_IN_TRAINING | _OF_DFLASH))
def train_eagle3_command(
    draft_vocab: int | None, steps: int, feature_layers: tuple[int, ...] | None, **values: Any
) -> None:
    """Train an EAGLE-3 drafter for a target.

    The target answers every turn of the traces; the drafter learns to say what it said. Weights go
    to the output in the format that EAGLE-3 engines read, with a model card. The target runs in
    --dtype, and training computes in it, too, if it is bfloat16.
    """
    from whiflash_agents.drafter_kinds import Eagle3Options

    train_drafter(
        Eagle3Options(draft_vocab=draft_vocab, feature_layers=feature_layers, steps=steps), **values
    )


@train.command(
    "dflash",
    epilog="""\b
Examples:
  whiflash-batch train dflash traces.jsonl -o drafters/dflash --target T --dtype bfloat16
  whiflash-batch train dflash traces.jsonl -o drafters/refined --init drafters/dflash \\
      --objective on-policy --learning-rate 1e-4 --epochs 1

Exit status: 0 trained, 1 unfinished (time was up: the same command goes on), 2 usage, unreadable
input, or nothing to learn from, 130 interrupted by Ctrl-C, 143 by SIGTERM: the same command goes
on.""",
)
@drafter_options
@click.option(
    "--block-size",
    type=int,
    metavar="N",
    help="Slots of a block, the token before the draft included.  [default: 8]",
)
@click.option(
    "--layers", type=int, metavar="N", help="Decoder layers of the drafter.  [default: 3]"
)
@click.option(
    "--mask-token",
    type=int,
    metavar="ID",
    help="Token that stands for what is not known yet.  [default: one that no text has]",
)
@click.option(
    "--anchors",
    type=int,
    default=64,
    show_default=True,
    metavar="N",
    help="Most blocks of a text per step.",
)
@click.option(
    "--objective",
    type=click.Choice(["standard", "on-policy"]),
    default="standard",
    show_default=True,
    help="on-policy: learn from what the drafter itself drafts along the texts (to refine one that "
    "drafts already: --init).",
)
@settings_options(*(n for n in STUDY_SETTINGS if n not in NOT_IN_TRAINING | OF_EAGLE3))
def train_dflash_command(
    block_size: int | None,
    layers: int | None,
    mask_token: int | None,
    anchors: int,
    objective: Any,
    feature_layers: tuple[int, ...] | None,
    **values: Any,
) -> None:
    """Train a DFlash drafter for a target.

    The target answers every turn of the traces; the drafter learns to say whole blocks of it at
    once. Weights go to the output in the format that DFlash engines read, with a model card. The
    target runs in --dtype, and training computes in it, too, if it is bfloat16.
    """
    from whiflash_agents.drafter_kinds import DFlashOptions

    options = DFlashOptions(
        block_size=block_size,
        num_layers=layers,
        feature_layers=feature_layers,
        mask_token=mask_token,
        objective=objective,
        anchors=anchors,
    )
    train_drafter(options, **values)


def train_drafter(
    network: KindOptions,
    *,
    traces: tuple[str, ...],
    output: str,
    resume: bool,
    responses: str | None,
    regenerate: bool,
    concurrency: int,
    epochs: float,
    texts_per_batch: int,
    learning_rate: float,
    minutes: float | None,
    checkpoint_minutes: float,
    held_out: float,
    max_length: int | None,
    init: str | None,
    config: str | None,
    quiet: bool,
    warm_start: bool | None = None,
    features: str = "computed",
    **values: Any,
) -> None:
    """What every command that trains a drafter or a head does; ends the process."""
    from whiflash_agents.drafter_plan import TrainingPlan
    from whiflash_agents.drafter_training import DrafterTraining
    from whiflash_agents.option_names import in_options
    from whiflash_agents.settings import load_settings
    from whiflash_agents.training_progress import training_progress

    values["stop"] = list(values["stop"]) or None
    outcome = settings = None
    with _interrupts() as received:
        try:
            settings = load_settings({**values, "workers": 0}, config=config)
            plan = TrainingPlan(
                network,
                Path(output),
                responses=None if responses is None else Path(responses),
                regenerate=regenerate,
                concurrency=concurrency,
                epochs=epochs,
                texts_per_batch=texts_per_batch,
                learning_rate=learning_rate,
                minutes=minutes,
                checkpoint_minutes=checkpoint_minutes,
                held_out=held_out,
                features=features,
                init=init,
                warm_start=warm_start,
                max_length=max_length,
                restart=not resume,
                command=_command(settings, list(values)),
            )
            running = DrafterTraining(settings, plan, progress=training_progress(quiet))
            received.training = running
            outcome = running.run(traces)
        except WhiFlashError as error:
            head = network.kind != network.family
            told = in_options(error, family=network.family, head=head, settings=settings)
            fail(told, EXIT_USAGE)
        except KeyboardInterrupt:
            click.echo("whiflash-batch: interrupted; the same command goes on", err=True)
    if outcome is not None and not quiet:
        _print_training(outcome)
    if received.signal is not None and (outcome is None or not outcome.training.finished):
        sys.exit(128 + received.signal)
    sys.exit(0 if outcome is not None and outcome.training.finished else EXIT_FAILED_ROWS)


def _command(settings: Settings, fields: Sequence[str]) -> str:
    """The command for the model card: as it was typed, and what came from elsewhere as options."""
    typed = list(sys.argv[1:])
    for at, word in enumerate(typed):
        if word.partition("=")[0] == "--config":  # spelled out instead
            del typed[at : at + (1 if "=" in word else 2)]
            break
    end = typed.index("--") if "--" in typed else len(typed)
    typed[end:end] = options_from_elsewhere(settings, fields)
    return shlex.join(["whiflash-batch", *typed])


class _Received:
    """The signal that came, and whom to tell."""

    signal: int | None = None
    training: DrafterTraining | None = None


@contextmanager
def _interrupts() -> Iterator[_Received]:
    """SIGINT and SIGTERM end training after the step at hand; anywhere else, and the second time,
    they end the command at once. What is done is kept in any case."""
    received = _Received()

    def handle(number: int, frame: Any) -> None:
        again, received.signal = received.signal is not None, number
        if again or received.training is None or not received.training.stop():
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_training(outcome: TrainedDrafter) -> None:
    from rich.console import Console

    from whiflash_agents.drafter_card import training_tables

    console = Console(stderr=True, width=None if sys.stderr.isatty() else 140)
    for table in training_tables(outcome):
        console.print(table)
    if not outcome.training.finished:
        again = "the same command without --restart" if outcome.plan.restart else "the same command"
        console.print(
            f"unfinished; {again} goes on, and writes the drafter at the end", highlight=False
        )


@train.command(
    "router",
    epilog="""\b
Example:
  whiflash-batch train router traces.jsonl -o router.safetensors --target T --eagle3 E --dflash D

Exit status: 0 trained, 2 usage, unreadable input, or too little to learn from, 130 interrupted by
Ctrl-C, 143 by SIGTERM: nothing is kept.""",
)
@click.argument("traces", nargs=-1, required=True, metavar="TRACES...")
@click.option("-o", "--output", required=True, metavar="FILE", help="Where the weights go.")
@click.option("--overwrite", is_flag=True, help="Replace an output that already exists.")
@click.option(
    "--kind",
    type=click.Choice(["neural", "cost-aware"]),
    default="neural",
    show_default=True,
    help="The router that it is for: neural (eagle3 or dflash) or cost-aware (all drafters given).",
)
@click.option("--config", metavar="FILE", help="Read settings from a TOML file.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no table.")
@settings_options(*STUDY_SETTINGS)
def train_router_command(
    traces: tuple[str, ...],
    output: str,
    overwrite: bool,
    kind: str,
    config: str | None,
    quiet: bool,
    **values: Any,
) -> None:
    """Train a router on what every drafter would have achieved at every round.

    The target writes the turns of the traces; every drafter drafts at every round of them. Tells
    how much of the labels is explained and what routing by it is worth on turns that were held out.
    """
    from whiflash_agents.bench import Bench
    from whiflash_agents.bench_report import training_table
    from whiflash_agents.router_training import train_router
    from whiflash_agents.settings import load_settings

    values["stop"] = list(values["stop"]) or None
    with interrupts() as received:
        try:
            settings = load_settings({**values, "workers": 0}, config=config)
            running = Bench(settings, progress=progress_for(quiet, "-"), contenders=["none"])
            report = train_router(
                running,
                traces,
                output,
                kind=kind,
                seed=settings.sampling.seed,
                overwrite=overwrite,
                config=config,
            )
        except WhiFlashError as error:
            fail(error, EXIT_USAGE)
        except KeyboardInterrupt:
            click.echo("whiflash-batch: interrupted; nothing is kept", err=True)
            sys.exit(received.status)
    if not quiet:
        table_console(stderr=True).print(training_table(report))
