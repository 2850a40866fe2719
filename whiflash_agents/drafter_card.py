"""What is told of a trained drafter: the model card beside its weights, and a table for the reader.

Names of files only, no folders: a card travels with the weights to other machines.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from whiflash_agents.training_folder import TRAINED_BY
from whiflash_agents.training_progress import counted, figure_rows

if TYPE_CHECKING:
    from rich.table import Table

    from whiflash_agents.drafter_acceptance import Rounds
    from whiflash_agents.drafter_plan import TrainedDrafter
    from whiflash_agents.settings import Settings

_NAMES = {
    "eagle3": "EAGLE-3",
    "dflash": "DFlash",
    "local-head": "DFlash with a local head",
    "length-head": "DFlash with a length head",
}


_FILES = {
    "local head": "`local_head.json` and `local_head.safetensors`",
    "length head": "`model.safetensors`, with the drafter's weights",
}


def training_rows(outcome: TrainedDrafter) -> list[tuple[str, str]]:
    """(figure, value) of what was trained on what."""
    training, texts = outcome.training, outcome.texts
    covered = outcome.coverage
    return [
        ("texts trained on, held out", f"{outcome.train:,}, {outcome.held_out:,}"),
        ("response tokens", f"{texts.num_response_tokens:,}"),
        *(
            []
            if covered is None
            else [("of those trained on, in the draft vocabulary", f"{100 * covered:.1f} %")]
        ),
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
    texts = counted(outcome.measured, "held-out text")
    lengths = Table(title=f"tokens per round on {texts}\n(rounds of an engine, {_drawn(outcome)})")
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
    texts = outcome.texts
    lines = [
        f"# {_NAMES[kind]}: drafter for {target}",
        "",
        f"Drafts for speculative decoding with {target}, and with no other model. {TRAINED_BY} "
        f"{__version__}.",
        "",
        *_heads(outcome),
        "## Data",
        "",
        *_data(outcome),
        f"- texts: {outcome.train:,} to train on, {outcome.held_out:,} held out (whole traces); "
        f"{counted(texts.num_response_tokens, 'response token')} in all",
    ]
    if left := texts.left_out.total():
        lines.append(f"- left out: {counted(left, 'turn')}")
    lines += ["", "## Training", ""]
    if plan.init is not None:
        lines += [f"Began with the drafter `{PurePath(plan.init).name}`.", ""]
    if plan.command is not None:
        lines += ["```", plan.command, "```", ""]
    machine = outcome.machine
    epochs = "1 epoch" if plan.epochs == 1 else f"{plan.epochs:g} epochs"
    lines += [
        f"- seed {settings.sampling.seed}, {epochs} of {counted(plan.texts_per_batch, 'text')} per "
        f"step, peak learning rate {plan.learning_rate:g}",
        f"- {outcome.training.seconds / 60:.1f} minutes on {machine['device']} "
        f"({counted(machine['threads'], 'thread')}, {machine['dtype']}), torch {torch.__version__}",
        "",
        "## Figures",
        "",
        "| figure | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in training_rows(outcome)),
    ]
    if outcome.training.history:
        lines += [
            "",
            f"The held-out figures of this table are training's own, on "
            f"{counted(outcome.held_out, 'held-out text')} after the last step: of greedy drafts "
            "that begin at positions all along the responses.",
        ]
    if outcome.acceptance:
        lines += [
            "",
            "Tokens per round (acceptance length, bonus token included) of an engine that drafts "
            "with one arm alone, each round beginning where the one before ended: along "
            f"{counted(outcome.measured, 'held-out text')} ({_drawn(outcome)}), with the weights "
            "as they are saved.",
            "",
            *_arms(outcome),
            "",
            "| arm | rounds that begin in | acceptance length | rounds |",
            "|---|---|---|---|",
            *(
                f"| {arm} | {kind} | {rounds.mean_acceptance_length:.2f} | {rounds.rounds:,} |"
                for arm, kind, rounds in acceptance_rows(outcome)
            ),
        ]
    return "\n".join(lines) + "\n"


def _heads(outcome: TrainedDrafter) -> list[str]:
    """What is in the folder beside the drafter, and where it is from."""
    trained = outcome.plan.network.kind.replace("-", " ")
    lines = []
    for head in outcome.heads:
        origin = "trained here" if head == trained else "as it came with the drafter begun with"
        lines.append(f"- a {head}, {origin}: {_FILES[head]}")
    return ["In this folder beside the drafter:", "", *lines, ""] if lines else []


def _data(outcome: TrainedDrafter) -> list[str]:
    """Where texts come from."""
    names = ("standard input" if n == "-" else f"`{PurePath(n).name}`" for n in outcome.traces)
    there, settings = outcome.input, outcome.settings
    traces = f"- traces: {', '.join(names)}: {counted(there.traces, 'trace')}"
    if not outcome.plan.regenerate:
        responses = "the recorded assistant turns"
    else:
        limit = f"at most {counted(settings.sampling.max_tokens, 'token')} each"
        responses = f"{_sampled(settings)}, {limit}"
        if settings.run.mode == "continue":
            responses = f"the turn that the target writes behind each of them, {responses}"
        else:
            responses = f"the target's own answers to every recorded history, {responses}"
    if settings.run.mode == "replay":
        traces += f" with {counted(there.rows, 'assistant turn')}"
    return [traces, f"- responses (mode {settings.run.mode}): {responses}"]


def _sampled(settings: Settings) -> str:
    """How responses were drawn: `greedily`, or all that decided."""
    ours, usual = settings.sampling, type(settings.sampling)()
    how = f"at temperature {ours.temperature:g}" if ours.temperature else "greedily"
    told = ("temperature", "max_tokens", "logprobs", "top_logprobs", "seed")
    changed = [
        f"{name.replace('_', ' ')} {value}"
        for name, value in ours.model_dump().items()
        if name not in told and value != getattr(usual, name)
    ]
    return ", ".join([how, *changed])


def _drawn(outcome: TrainedDrafter) -> str:
    """How the held-out texts came about."""
    if not outcome.plan.regenerate:
        return "recorded turns"
    return f"mode {outcome.settings.run.mode}, {_sampled(outcome.settings)}"


def _arms(outcome: TrainedDrafter) -> list[str]:
    """What each arm of the table drafts."""
    drafters, kind = outcome.settings.drafters, outcome.plan.network.kind.replace("-", " ")
    heads = f", with its {' and its '.join(outcome.heads)}" if outcome.heads else ""
    drafts = {
        "eagle3": f"trees of up to {drafters.eagle3_tokens} tokens, {drafters.eagle3_depth} deep",
        "dflash": f"a block as a chain{heads}",
        "ddtree": f"trees of up to {drafters.ddtree_nodes} tokens from a block",
        "dflash-plain": f"the same without the {kind}",
    }
    return [f"- {arm}: {drafts[arm]}" for arm in outcome.acceptance]
