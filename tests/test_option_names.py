"""Messages of training name options where the engine names fields, and leave the rest alone."""

from __future__ import annotations

import pytest

from whiflash_agents.engine.errors import (
    Change,
    ChangedError,
    CheckpointError,
    OutputError,
    SettingsError,
    WhiFlashError,
)
from whiflash_agents.option_names import in_options
from whiflash_agents.settings import load_settings


def told(error: WhiFlashError, *, head: bool = False) -> str:
    return str(in_options(error, family="dflash", head=head))


def changed(*changes: tuple[str, object, object], head: bool = False) -> str:
    error = ChangedError("what is in num_layers=3/x", [Change(*c) for c in changes], "go on")
    text = told(error, head=head)
    assert text.startswith("what is in num_layers=3/x (")
    assert text.endswith("); go on")
    return text.removeprefix("what is in num_layers=3/x (").removesuffix("); go on")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("peak_learning_rate=0.0: expected a rate", "--learning-rate=0.0: expected a rate"),
        ("Lower peak_learning_rate=1.0, or", "Lower --learning-rate=1.0, or"),
        ("float32 (autocast='bfloat16' now)", "float32 (--dtype='bfloat16' now)"),
        ("feature_layers=[0, 9]: expected", "--feature-layers=0,9: expected"),
        ("so give feature_layers", "so give --feature-layers"),
        ("Give a mask_token_id: a token", "Give a --mask-token: a token"),
        ("unigram_weight=11.0, weight=2.0", "--unigram-weight=11.0, --weight=2.0"),
        ("the steps of a rank and its weight", "the steps of a rank and its weight"),
        ("/data/num_layers/x and 'block_size' are", "/data/num_layers/x and 'block_size' are"),
        ("num_layers.json, my-epochs=3", "num_layers.json, my-epochs=3"),
        ("a draft vocabulary of 0 tokens", "--draft-vocab: a draft vocabulary of 0 tokens"),
    ],
)
def test_fields_are_told_as_options_and_words_and_paths_stay(text: str, wanted: str) -> None:
    assert told(SettingsError(text)) == wanted


def test_files_are_told_as_they_are_called() -> None:
    text = "output num_layers=4 holds epochs=3"
    assert told(OutputError(text)) == text


def test_the_drafter_begun_with_is_the_option_of_its_command() -> None:
    missing = WhiFlashError("dflash (--dflash): there is no folder ./x")
    assert told(missing) == "--init: there is no folder ./x"
    assert told(missing, head=True) == "--dflash: there is no folder ./x"
    other = CheckpointError(
        "'x' holds an EAGLE-3 drafter; give it as eagle3 (--eagle3, with router eagle3; "
        "load_eagle3 in Python), or give the folder of another drafter"
    )
    assert (
        told(other) == "'x' holds an EAGLE-3 drafter; name the folder of another drafter (--init)"
    )
    assert told(SettingsError("block_size cannot be given with init='x'")) == (
        "--block-size cannot be given with --init='x'"
    )


def test_what_changed_is_told_once_and_without_fingerprints() -> None:
    one, other = "0" * 32, "f" * 32
    assert changed(("settings.peak_learning_rate", 0.1, 0.2)) == "--learning-rate: 0.1, now 0.2"
    assert changed(("settings.autocast", "float32", "bfloat16")) == (
        "--dtype: float32, now bfloat16"
    )
    assert changed(("texts.count", 3, 4), ("texts.fingerprint", one, other)) == (
        "the texts: 3, now 4"
    )
    assert changed(("texts.fingerprint", one, other)) == "the texts: as many, but others"
    assert changed(("target", one, other), ("top_k", 0, 5)) == (
        "the target (--target, --adapter, --dtype): another; --top-k: 0, now 5"
    )
    kind = ("drafter.kind", "eagle3", "dflash")
    assert changed(kind, ("drafter.steps", 7, None), ("network.block_size", None, 8)) == (
        "the kind of drafter: eagle3, now dflash"
    )
    assert changed(("network.weights", 10, 20), ("network.layers.num_layers", 1, 2)) == (
        "--layers: 1, now 2"
    )
    assert changed(("network.weights", 10, 20)) == "the drafter's weights: 10, now 20"
    assert changed(("layers", [0, 1], [1, 2])) == "--feature-layers: 0,1, now 1,2"
    assert changed(("settings.warmup", 0.1, 0.2)) == "settings.warmup: 0.1, now 0.2"


def test_another_beginning_is_told_by_its_options() -> None:
    one, other = "drafter " + "0" * 32, "drafter " + "f" * 32
    warm, cold = "warm start", "random weights"
    assert changed(("begin", warm, cold)) == "--warm-start, now --no-warm-start"
    assert changed(("begin", warm, one)) == "--warm-start, now --init"
    assert changed(("begin", one, other)) == "--init: another drafter"
    assert changed(("begin", one, other), head=True) == "--dflash: another drafter"
    # A head's own weights are in it, which begin as its sizes, the seed and the texts have them.
    for change, wanted in (
        (("drafter.rank", 4, 8), "--rank: 4, now 8"),
        (("settings.seed", 0, 1), "--seed: 0, now 1"),
        (("texts.count", 3, 4), "the texts: 3, now 4"),
    ):
        assert changed(("begin", one, other), change, head=True) == wanted
    assert changed(("begin", one, other), ("drafter.steps", 4, 8)) == (
        "--init: another drafter; --steps: 4, now 8"
    )


def test_who_set_the_mode_is_told() -> None:
    error = SettingsError("mode='continue' writes turns")
    for environment, values, wanted in (
        ({}, {"mode": "continue"}, "--mode='continue' writes turns"),
        (
            {"WHIFLASH_MODE": "continue"},
            {},
            "environment variable WHIFLASH_MODE: mode='continue' writes turns",
        ),
    ):
        settings = load_settings(values, environment=environment)
        text = str(in_options(error, family="eagle3", head=False, settings=settings))
        assert text == wanted
