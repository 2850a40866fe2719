"""What is told of a trained drafter: the model card beside its weights, and a table for the reader.

Names of files only, no folders: a card travels with the weights to other machines.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from whiflash_agents.training_progress import figure_rows

if TYPE_CHECKING:
    from rich.table import Table

    from whiflash_agents.drafter_acceptance import Rounds
    from whiflash_agents.drafter_plan import TrainedDrafter

_NAMES = {
    "eagle3": "EAGLE-3",
    "dflash": "DFlash",
    "local-head": "DFlash with a local head",
    "length-head": "DFlash with a length head",
}


def training_rows(outcome: TrainedDrafter) -> list[tuple[str, str]]:
    """(figure, value) of what was trained on what."""
    training, texts = outcome.training, outcome.texts
    return [
        ("texts trained on, held out", f"{outcome.train:,}, {outcome.held_out:,}"),
        ("response tokens", f"{texts.num_response_tokens:,}"),
        ("weights", f"{outcome.network['weights']:,}"),
        ("steps", f"{training.step:,} of {training.total:,}"),
        ("minutes of training", f"{training.seconds / 60:.1f}"),
        *figure_rows(training.history),
    ]


def acceptance_rows(outcome: TrainedDrafter) -> list[tuple[str, str, Rounds]]:
    """(arm, span or `all`, rounds) on held-out texts."""
    return [
        (arm, kind, rounds)
        for arm, found in outcome.acceptance.items()
        for kind, rounds in (("all", found.total), *sorted(found.by_span.items()))
    ]


def training_tables(outcome: TrainedDrafter) -> list[Table]:
    """What is shown at the end."""
    from rich.table import Table

    title = f"{_NAMES[outcome.plan.network.kind]} for {outcome.target}"
    table = Table(
        title=title + ("" if outcome.training.finished else " (unfinished)"), title_style="bold"
    )
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in training_rows(outcome):
        table.add_row(name, value)
    if not outcome.acceptance:
        return [table]
    lengths = Table(title=f"tokens per round on {outcome.measured} held-out texts")
    for name in ("arm", "rounds that begin in"):
        lengths.add_column(name)
    for name in ("acceptance length", "rounds"):
        lengths.add_column(name, justify="right")
    for arm, kind, rounds in acceptance_rows(outcome):
        length = f"{rounds.mean_acceptance_length:.2f}"
        lengths.add_row(arm, kind, length, f"{rounds.rounds:,}")
    return [table, lengths]


def model_card(outcome: TrainedDrafter) -> str:
    """The text of README.md."""
    import torch

    from whiflash_agents import __version__

    plan, settings = outcome.plan, outcome.settings
    kind, target = plan.network.kind, PurePath(outcome.target).name
    files = ", ".join(f"`{PurePath(name).name}`" for name in outcome.traces)
    counted, texts = outcome.input, outcome.texts
    if plan.regenerate:
        sampling = settings.sampling
        how = "greedily" if not sampling.temperature else f"at temperature {sampling.temperature}"
        origin = (
            f"the target's own answers to every recorded history, {how}, at most "
            f"{sampling.max_tokens} tokens each"
        )
    else:
        origin = "the recorded assistant turns"
    lines = [
        f"# {_NAMES[kind]}: drafter for {target}",
        "",
        f"Drafts for speculative decoding with {target}, and with no other model. Trained by "
        f"whiflash-agents {__version__}.",
        "",
        "## Data",
        "",
        f"- traces: {files}: {counted.traces:,} traces with {counted.rows:,} assistant turns",
        f"- responses: {origin}",
        f"- texts: {outcome.train:,} to train on, {outcome.held_out:,} held out (whole traces); "
        f"{texts.num_response_tokens:,} response tokens in all",
    ]
    if left := texts.left_out.total():
        lines.append(f"- left out: {left:,} turns")
    lines += ["", "## Training", ""]
    if plan.init is not None:
        lines += [f"Began with the drafter `{PurePath(plan.init).name}`.", ""]
    if plan.command is not None:
        lines += ["```", plan.command, "```", ""]
    machine = outcome.machine
    lines += [
        f"- seed {settings.sampling.seed}, {plan.epochs:g} epochs of {plan.texts_per_batch} texts "
        f"per step, peak learning rate {plan.learning_rate:g}",
        f"- {outcome.training.seconds / 60:.1f} minutes on {machine['device']} "
        f"({machine['threads']} threads, {machine['dtype']}), torch {torch.__version__}",
        "",
        "## Figures",
        "",
        "| figure | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in training_rows(outcome)),
    ]
    if outcome.acceptance:
        lines += [
            "",
            f"Tokens per round (acceptance length, bonus token included) along {outcome.measured} "
            "held-out texts, each arm alone:",
            "",
            "| arm | rounds that begin in | acceptance length | rounds |",
            "|---|---|---|---|",
            *(
                f"| {arm} | {kind} | {rounds.mean_acceptance_length:.2f} | {rounds.rounds:,} |"
                for arm, kind, rounds in acceptance_rows(outcome)
            ),
        ]
    return "\n".join(lines) + "\n"
