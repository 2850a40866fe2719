"""The options that the commands that train drafters and heads share, beside the settings of a
run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from whiflash_agents.settings import Settings


def _layers(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{value!r}: expected numbers with commas between them, such as 2,15,27"
        ) from None


_DATA: list[Callable[[Any], Any]] = [
    click.argument("traces", nargs=-1, required=True, metavar="TRACES..."),
    click.option("-o", "--output", required=True, metavar="FOLDER", help="Where the drafter goes."),
    click.option(
        "--resume/--restart",
        default=True,
        help="Go on from what an earlier sitting left in the output, or begin training anew "
        "(responses are kept).  [default: resume]",
    ),
    click.option(
        "--responses",
        metavar="FILE",
        help="Where the target's responses are kept, and taken from if they are there; not with "
        "--no-regenerate.  [default: responses.jsonl beside the output, which drafters there "
        "share]",
    ),
    click.option(
        "--regenerate/--no-regenerate",
        default=True,
        help="Train on the target's own answers to the recorded histories, or on the recorded "
        "turns as they are.  [default: regenerate]",
    ),
    click.option(
        "--concurrency",
        type=click.IntRange(min=1),
        default=32,
        show_default=True,
        metavar="N",
        help="Responses generated at once.",
    ),
    click.option(
        "--epochs",
        type=float,
        default=4.0,
        show_default=True,
        metavar="X",
        help="Times that every text comes up.",
    ),
    click.option(
        "--texts-per-batch",
        type=int,
        default=4,
        show_default=True,
        metavar="N",
        help="Texts per step.",
    ),
    click.option(
        "--learning-rate",
        type=float,
        default=1e-3,
        show_default=True,
        metavar="X",
        help="Its peak, after the warm-up.",
    ),
    click.option(
        "--minutes",
        type=float,
        metavar="X",
        help="Stop training after X minutes, to be gone on with by the same command; the drafter "
        "is written at the end.",
    ),
    click.option(
        "--checkpoint-minutes",
        type=float,
        default=5.0,
        show_default=True,
        metavar="X",
        help="Training time that is lost at most if the machine fails.",
    ),
    click.option(
        "--held-out",
        type=float,
        default=0.05,
        show_default=True,
        metavar="X",
        help="Share of the traces that is kept to judge by, at most 0.5; 0 for none.",
    ),
    click.option(
        "--max-length",
        type=click.IntRange(min=2),
        metavar="N",
        help="Leave out texts of more tokens.  [default: the target's context]",
    ),
]
_DRAFTER: list[Callable[[Any], Any]] = [
    click.option(
        "--init",
        metavar="PATH",
        help="Folder or Hugging Face name of a drafter of this target to go on from.",
    ),
    click.option(
        "--warm-start/--no-warm-start",
        default=None,
        help="Begin with copies of the target's last layers, or with random weights."
        "  [default: warm start, unless there is --init]",
    ),
    click.option(
        "--feature-layers",
        metavar="N,N,...",
        callback=_layers,
        help="Hidden states of the target that the drafter reads (0 is the embedding)."
        "  [default: as published]",
    ),
    click.option(
        "--features",
        default="computed",
        show_default=True,
        metavar="computed|FOLDER",
        help="Compute the target's hidden states in every epoch, or once and keep them in FOLDER "
        "(not with --objective on-policy).",
    ),
]
_HEAD: list[Callable[[Any], Any]] = [
    click.option(
        "--dflash",
        "init",
        required=True,
        metavar="PATH",
        help="Folder or Hugging Face name of the DFlash drafter that it is for.",
    ),
]
_REST: list[Callable[[Any], Any]] = [
    click.option("--config", metavar="FILE", help="Read settings from a TOML file."),
    click.option("-q", "--quiet", is_flag=True, help="No progress and no tables."),
]


def drafter_options(command: Any) -> Any:
    """Add the options of `train eagle3` and `train dflash` to a command."""
    return _with(command, [*_DATA, *_DRAFTER, *_REST])


def head_options(command: Any) -> Any:
    """Add the options of `train local-head` and `train length-head` to a command."""
    return _with(command, [*_DATA, *_HEAD, *_REST])


def options_from_elsewhere(settings: Settings, fields: Iterable[str]) -> list[str]:
    """The options that say what environment variables and a file set, for a command that is to do
    the same without them.

    Args:
        fields: those that the command has options for.
    """
    from whiflash_agents.settings import option_name, sections

    homes, words = sections(), []
    for field in fields:
        origin, option = settings.origin_of(field), option_name(field)
        if origin is None or origin == option:
            continue
        value = getattr(getattr(settings, homes[field]), field)
        if isinstance(value, bool):
            words.append(option if value else option_name(f"no_{field}"))
        elif isinstance(value, list):
            words += [word for each in value for word in (option, str(each))]
        elif value is not None:
            words += [option, str(value)]
    return words


def _with(command: Any, options: list[Callable[[Any], Any]]) -> Any:
    for option in reversed(options):
        command = option(command)
    return command
