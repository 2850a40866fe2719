"""Training of heads on top of a block drafter: losses, labels, learning, and going on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import draft_reference as reference
import pytest
import tiny
import tiny_drafters
import torch
from test_heads import chains, local_head
from test_training_objectives import cycle_text, seeded

from whiflash_agents.engine.drafters.candidates import Coupling
from whiflash_agents.engine.drafters.local_chain import draft_chains
from whiflash_agents.engine.drafters.local_head import LocalHead, LocalHeadConfig
from whiflash_agents.engine.errors import SettingsError
from whiflash_agents.engine.training.dflash import BlockTraining
from whiflash_agents.engine.training.feature_source import ComputedFeatures
from whiflash_agents.engine.training.length_head import LengthHeadObjective, new_length_head
from whiflash_agents.engine.training.local_head import (
    LocalHeadObjective,
    log_frequencies,
    new_local_head,
)
from whiflash_agents.engine.training.loop import TrainingLoop
from whiflash_agents.engine.training.schedule import TrainSettings
from whiflash_agents.engine.training.texts import TrainingText


def run_loop(objective: Any, folder: Path, **changes: Any) -> Any:
    options: dict[str, Any] = {"epochs": 10, "peak_learning_rate": 1e-2, "autocast": "float32"}
    settings = TrainSettings(**(options | changes))
    loop = TrainingLoop(objective, [cycle_text(n) for n in range(24)], settings, folder)
    return loop.run()


def fresh_local_head(**changes: Any) -> LocalHead:
    texts = [cycle_text(n) for n in range(24)]
    fields: dict[str, Any] = {"state_size": 24, "rank": 16, "weight": 1.0, "unigram_weight": 1.0}
    config = LocalHeadConfig(32, tiny.VOCAB, 5, **(fields | changes))
    return new_local_head(config, tiny_drafters.markov_target(), texts)


def test_frequencies_are_those_of_the_responses() -> None:
    texts = [TrainingText("a", (1, 2, 2, 3, 4), ((1, 3), (4, 5)))]
    wanted = torch.tensor([1.0, 1.0, 3.0, 1.0, 2.0, 1.0]) / 9
    assert torch.allclose(log_frequencies(texts, 6).exp(), wanted)
    with pytest.raises(SettingsError, match="token 4 is outside the target's vocabulary of 4"):
        log_frequencies(texts, 4)


@pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
def test_a_local_head_learns_what_follows_what_and_repairs_a_block(
    tmp_path: Path, autocast: Any
) -> None:
    head, target = fresh_local_head(), tiny_drafters.markov_target()
    objective = LocalHeadObjective(head, target, anchors=16)
    before = objective.loss(cycle_text(1), seeded())
    trained = run_loop(objective, tmp_path, autocast=autocast)
    assert "accuracy@1" not in trained.figures
    assert all(trained.figures[f"accuracy@{k}"] > 0.95 for k in range(2, 6))
    assert trained.loss < 0.2 * before.total.item() / before.weight
    # A block that knows which tokens are likely, and not in which order: only its first is right.
    logits = torch.full((5, tiny.VOCAB), -4.0)
    logits[:, list(tiny_drafters.USED)] = 2.0
    logits[0, tiny_drafters.FOLLOWS[5]] = 9.0
    said = chains(head, logits, [5], target=target)[0]
    wanted = [5]
    for _ in range(5):
        wanted.append(tiny_drafters.FOLLOWS[wanted[-1]])
    assert said == wanted[1:]


def test_the_loss_of_a_local_head_is_cross_entropy_behind_the_first_token() -> None:
    head = fresh_local_head()
    objective = LocalHeadObjective(head, tiny_drafters.markov_target(), anchors=64)
    a_text = TrainingText("a", (3, 4, 5, 3, 4, 5, 3), ((3, 7),))
    loss = objective.loss(a_text, seeded())
    table, total, count = tiny_drafters.markov_target().embedding, 0.0, 0
    for anchor in (3, 4, 5):
        for at in range(anchor + 2, 7):
            states = head(table[torch.tensor([a_text.token_ids[anchor:at]])])
            chances = head.logits(head.project(states[:, -1])).log_softmax(-1)
            total -= chances[0, a_text.token_ids[at]].item()
            count += 1
    assert (loss.weight, loss.total.item()) == (count, pytest.approx(total, rel=1e-4))
    short = objective.loss(TrainingText("b", (3, 4, 5), ((1, 3),)), seeded())
    assert (short.weight, short.total.item()) == (0.0, 0.0)
    short.total.backward()


def half_trained() -> Any:
    """A drafter that is right behind some tokens and wrong behind others."""
    return tiny_drafters.agreeing_dflash()


def mixed_text(number: int) -> TrainingText:
    """Cycles that the drafter knows, broken off by tokens that nobody could foresee."""
    generator = seeded(number)
    said = list(cycle_text(number).token_ids[:24])
    noise = torch.randint(20, tiny.VOCAB - 1, (24,), generator=generator).tolist()
    return TrainingText(f"mixed-{number}", tuple(said + noise), ((4, 48),))


def length_objective(model: Any, anchors: int = 24) -> LengthHeadObjective:
    target = tiny_drafters.markov_target()
    source = ComputedFeatures(target, model.config.feature_layers)
    head = new_length_head(model, target, bottleneck=16)
    return LengthHeadObjective(head, model, target, source, anchors=anchors)


@pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
def test_a_length_head_learns_where_a_drafter_is_right(tmp_path: Path, autocast: Any) -> None:
    model = half_trained()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objective = length_objective(model)
    first = objective.loss(mixed_text(0), seeded()).figures
    settings = TrainSettings(20, 1, peak_learning_rate=1e-2, autocast=autocast)
    texts = [mixed_text(number) for number in range(16)]
    trained = TrainingLoop(objective, texts, settings, tmp_path).run()
    error, count = first["length_error"]
    assert trained.figures["length_error"] < 0.5 * error / count
    assert trained.figures["length_error"] < 0.13
    assert 1.5 < trained.figures["acceptance_length"] < 5
    assert trained.figures["verification_saved"] > 0.2
    assert trained.figures["tokens_lost"] < 0.1
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("local", [False, True])
def test_the_label_of_a_block_is_what_the_drafter_has_right(local: bool) -> None:
    model = tiny_drafters.dflash()
    model.local_head = local_head() if local else None
    objective = length_objective(model, anchors=64)
    a_text = mixed_text(3)
    loss = objective.loss(a_text, seeded())
    net = tiny_drafters.markov_net()
    features = reference.features(net, a_text.token_ids, model.config.feature_layers)
    tokens = torch.tensor(a_text.token_ids)
    blocks = BlockTraining(model, tiny_drafters.markov_target(), anchors=64, gamma=None)
    total, lengths = 0.0, []
    for anchor in range(4, 47):
        at = torch.tensor([anchor])
        slots = model.norm(blocks.slots(features, tokens, at))
        logits = blocks.logits(slots[0, 1:])
        said = logits.argmax(-1).tolist()
        if local:
            rows = torch.arange(5)
            coupling = Coupling(torch.zeros(5), rows, sampled=False)
            table = tiny_drafters.markov_target().embedding
            said = draft_chains(
                model.local_head, table, tokens[at], logits, [5], rows, coupling, lambda ids: ids
            )[0]
        accepted = 0
        while accepted < 5 and anchor + accepted + 1 < 48:
            if said[accepted] != a_text.token_ids[anchor + accepted + 1]:
                break
            accepted += 1
        share = torch.tensor((accepted + 1) / 6)
        logit = objective.head(slots)[0]
        total -= (share * logit.sigmoid().log() + (1 - share) * (1 - logit.sigmoid()).log()).item()
        lengths.append(accepted + 1)
    assert loss.weight == len(lengths)
    assert loss.total.item() == pytest.approx(total, rel=1e-4)
    assert loss.figures["acceptance_length"] == (sum(lengths), len(lengths))


def test_training_of_heads_that_is_stopped_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    def objectives() -> list[Any]:
        local = LocalHeadObjective(fresh_local_head(), tiny_drafters.markov_target(), anchors=8)
        return [local, length_objective(half_trained(), anchors=8)]

    settings = TrainSettings(epochs=1, autocast="float32")
    texts = [cycle_text(number) for number in range(16)]
    for at, (whole, parts) in enumerate(zip(objectives(), objectives(), strict=True)):
        TrainingLoop(whole, texts, settings, tmp_path / f"{at}-whole").run()
        folder = tmp_path / f"{at}-parts"
        loops: list[TrainingLoop] = []
        loop = TrainingLoop(
            parts, texts, settings, folder, on_step=lambda _, loops=loops: loops[0].stop()
        )
        loops.append(loop)
        assert not loop.run().finished
        again = objectives()[at]
        assert TrainingLoop(again, texts, settings, folder).run().finished
        for name, tensor in whole.network.state_dict().items():
            assert torch.equal(tensor, again.network.state_dict()[name]), name


def test_heads_that_cannot_be_are_refused() -> None:
    for wrong in (
        {"state_size": 0},
        {"rank": 0},
        {"weight": -0.1},
        {"unigram_weight": math.nan},
    ):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            fresh_local_head(**wrong)
    with pytest.raises(SettingsError, match="propose 1 token each"):
        new_local_head(LocalHeadConfig(32, tiny.VOCAB, 1), tiny_drafters.markov_target(), [])
    with pytest.raises(SettingsError, match="bottleneck=0"):
        new_length_head(half_trained(), tiny_drafters.markov_target(), bottleneck=0)
    with pytest.raises(SettingsError, match="anchors=0"):
        LocalHeadObjective(fresh_local_head(), tiny_drafters.markov_target(), anchors=0)
    with pytest.raises(SettingsError, match="anchors=0"):
        length_objective(half_trained(), anchors=0)
