"""The commands that train heads on top of a DFlash drafter: `train local-head`, `length-head`."""

from __future__ import annotations

from typing import Any

import click

from .cli_options import STUDY_SETTINGS, settings_options
from .cli_train import NOT_IN_TRAINING, OF_EAGLE3, train, train_drafter
from .cli_train_options import head_options

_SETTINGS = [n for n in STUDY_SETTINGS if n not in NOT_IN_TRAINING | OF_EAGLE3 | {"ddtree_nodes"}]
_STATUS = """
Exit status: 0 trained, 1 unfinished (time was up: the same command goes on), 2 usage, unreadable
input, or nothing to learn from, 130 interrupted by Ctrl-C, 143 by SIGTERM: the same command goes
on."""


@train.command(
    "local-head",
    epilog="""\b
Example:
  whiflash-batch train local-head traces.jsonl -o drafters/local --target T \\
      --dflash drafters/dflash
"""
    + _STATUS,
)
@head_options
@click.option(
    "--state-size",
    type=int,
    default=128,
    show_default=True,
    metavar="N",
    help="Of its recurrent network.",
)
@click.option(
    "--rank",
    type=int,
    default=64,
    show_default=True,
    metavar="N",
    help="Of its head over the vocabulary.",
)
@click.option(
    "--weight",
    type=float,
    default=0.3,
    show_default=True,
    metavar="X",
    help="What its logits count beside the drafter's.",
)
@click.option(
    "--unigram-weight",
    type=float,
    default=0.3,
    show_default=True,
    metavar="X",
    help="What the log frequencies of tokens count against them.",
)
@settings_options(*_SETTINGS)
def train_local_head_command(
    state_size: int, rank: int, weight: float, unigram_weight: float, **values: Any
) -> None:
    """Train a local head for a DFlash drafter (DeLS-Spec).

    It reads the tokens that a block proposed so far, and corrects the drafter's choice of the next.
    It learns from the answers' tokens alone; the drafter stays as it is, and goes to the output
    with the head beside its weights.
    """
    from whiflash_agents.head_kinds import LocalHeadOptions

    options = LocalHeadOptions(
        state_size=state_size, rank=rank, weight=weight, unigram_weight=unigram_weight
    )
    train_drafter(options, **values)


@train.command(
    "length-head",
    epilog="""\b
Example:
  whiflash-batch train length-head traces.jsonl -o drafters/length --target T \\
      --dflash drafters/dflash
"""
    + _STATUS,
)
@head_options
@click.option(
    "--bottleneck",
    type=int,
    default=256,
    show_default=True,
    metavar="N",
    help="Its inner width.",
)
@settings_options(*_SETTINGS)
def train_length_head_command(bottleneck: int, **values: Any) -> None:
    """Train an adaptive length head for a DFlash drafter (AdaFlash).

    It reads a block and predicts how much of it the target will accept, so that less is verified.
    The drafter stays as it is, and goes to the output with the head among its weights.
    """
    from whiflash_agents.head_kinds import LengthHeadOptions

    train_drafter(LengthHeadOptions(bottleneck=bottleneck), **values)
