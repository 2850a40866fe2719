"""The draft vocabulary that texts give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from whiflash_agents.engine.drafters.layers import DraftHead
from whiflash_agents.engine.errors import SettingsError
from whiflash_agents.engine.training.texts import TrainingText
from whiflash_agents.engine.training.vocabulary import (
    choose_vocabulary,
    coverage,
    draft_ids,
)


def text(name: str, prompt: list[int], response: list[int]) -> TrainingText:
    ids = (*prompt, *response)
    return TrainingText(name, ids, ((len(prompt), len(ids)),))


TEXTS = [text("a", [9, 9, 9, 9], [5, 5, 5, 7]), text("b", [9, 8], [7, 5, 3, 11])]


def test_the_tokens_of_responses_are_kept_by_frequency() -> None:
    vocabulary = choose_vocabulary(TEXTS, 3, 20)
    assert vocabulary.ids == (3, 5, 7)  # of 3 and 11, both said once, the lower one
    assert vocabulary.coverage == 7 / 8
    assert len(vocabulary) == 3


def test_what_a_vocabulary_has_of_other_texts_can_be_told() -> None:
    d2t = choose_vocabulary(TEXTS, 3, 20).d2t  # 3, 5 and 7
    assert coverage(d2t, TEXTS) == 7 / 8
    assert coverage(d2t, [text("c", [3, 5], [7, 9, 9])]) == 1 / 3
    assert coverage(d2t, [TrainingText("d", (3, 5), ())]) is None


def test_tokens_that_must_be_there_displace_others() -> None:
    vocabulary = choose_vocabulary(TEXTS, 3, 20, always=[19, 18])
    assert vocabulary.ids == (5, 18, 19)
    assert vocabulary.coverage == 4 / 8


def test_prompts_count_as_much_as_they_are_said_to() -> None:
    assert choose_vocabulary(TEXTS, 2, 20).ids == (5, 7)
    assert choose_vocabulary(TEXTS, 2, 20, prompt_weight=0.3).ids == (5, 7)
    assert choose_vocabulary(TEXTS, 2, 20, prompt_weight=0.5).ids == (5, 9)


def test_too_few_tokens_are_filled_up_from_the_lowest_ids() -> None:
    vocabulary = choose_vocabulary(TEXTS, 7, 20, always=[19])
    assert vocabulary.ids == (0, 1, 3, 5, 7, 11, 19)
    assert vocabulary.coverage == 1.0
    assert choose_vocabulary([], 3, 20).ids == (0, 1, 2)
    assert choose_vocabulary([], 3, 20).coverage is None


def test_maps_are_those_of_a_draft_head() -> None:
    vocabulary = choose_vocabulary(TEXTS, 4, 20)
    head = DraftHead(8, 4, reduced=True)
    head.d2t = vocabulary.d2t
    assert head.target_ids(torch.arange(4)).tolist() == list(vocabulary.ids) == [3, 5, 7, 11]
    assert vocabulary.t2d.nonzero().flatten().tolist() == [3, 5, 7, 11]
    back = draft_ids(head.d2t, 20)
    assert back[list(vocabulary.ids)].tolist() == [0, 1, 2, 3]
    assert int((back >= 0).sum()) == 4
    assert draft_ids(None, 5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"size": 0}, "0 tokens"),
        ({"size": 21}, "21 tokens"),
        ({"size": 1, "always": [1, 2]}, "cannot hold the 2"),
        ({"size": 3, "always": [20]}, "token 20 is outside"),
        ({"size": 3, "prompt_weight": -1.0}, "prompt_weight"),
        ({"size": 3, "vocab_size": 10}, "token 11 is outside"),
    ],
)
def test_what_cannot_be_chosen_is_refused(options: dict[str, Any], named: str) -> None:
    arguments = {"texts": TEXTS, "vocab_size": 20} | options
    with pytest.raises(SettingsError, match=named):
        choose_vocabulary(**arguments)
