"""Maps between a drafter's vocabulary and the target's: wrong ones draft wrong tokens silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints as tc
import torch

from whiflash_agents.engine.checkpoints import load_dflash, load_eagle3
from whiflash_agents.engine.errors import CheckpointError

Tensors = dict[str, torch.Tensor]


def refusal(load: Any, folder: Path, config: dict[str, Any], tensors: Tensors) -> str:
    tc.write(folder, config, tensors)
    with pytest.raises(CheckpointError) as caught:
        load(folder, tc.target())
    return str(caught.value)


def eagle3_refusal(folder: Path, tensors: Tensors, **fields: Any) -> str:
    return refusal(load_eagle3, folder, tc.eagle3_config(**fields), tensors)


def marks(*moved: tuple[int, bool]) -> torch.Tensor:
    marked = tc.vocabulary()["t2d"].clone()
    for token, value in moved:
        marked[token] = value
    return marked


def offsets(draft: int, offset: int) -> torch.Tensor:
    d2t = tc.vocabulary()["d2t"].clone()
    d2t[draft] = offset
    return d2t


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"d2t": offsets(3, 200)}, "maps draft id 3 to 203, expected a token from 0 to 95"),
        ({"d2t": offsets(3, -4)}, "maps draft id 3 to -1"),
        ({"d2t": offsets(3, 5)}, "maps several draft ids to token 8"),
        ({"d2t": tc.vocabulary()["d2t"] + torch.arange(40)}, "d2t holds offsets"),
        ({"d2t": torch.zeros(39, dtype=torch.int64)}, "has shape [39], expected [40]"),
        ({"d2t": torch.zeros(40)}, "'d2t' is of type float32"),
        ({"t2d": torch.zeros(95, dtype=torch.bool)}, "has shape [95], expected [96]"),
        ({"t2d": torch.zeros(96)}, "'t2d' is of type float32"),
        ({"t2d": marks((1, True))}, "marks 41 tokens, expected 40"),
        ({"t2d": marks((1, True), (6, False))}, "does not mark token 6"),
    ],
)
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_wrong_vocabulary_map_is_refused(
    tmp_path: Path, kind: str, changed: Tensors, said: str
) -> None:
    if kind == "eagle3":
        message = eagle3_refusal(tmp_path, tc.eagle3_tensors() | changed)
    else:
        tensors = tc.dflash_tensors() | tc.vocabulary() | {"lm_head.weight": tc.random(40, 32)}
        config = tc.speculators_config("dflash", layer={})
        message = refusal(load_dflash, tmp_path, config, tensors | changed)
    assert said in message


def test_missing_map_is_refused(tmp_path: Path) -> None:
    tensors = tc.eagle3_tensors()
    del tensors["d2t"]
    assert "'d2t' is missing, expected with shape [40]" in eagle3_refusal(tmp_path, tensors)


def test_map_of_a_full_vocabulary_must_be_the_identity(tmp_path: Path) -> None:
    tensors = tc.eagle3_tensors() | {"lm_head.weight": tc.random(tc.VOCAB, tc.HIDDEN)}
    del tensors["t2d"]
    shuffled = torch.arange(tc.VOCAB).flip(0) - torch.arange(tc.VOCAB)
    message = eagle3_refusal(tmp_path, tensors | {"d2t": shuffled}, draft_vocab_size=tc.VOCAB)
    assert "'d2t' is not all zero" in message
