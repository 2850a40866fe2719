"""The training loop: it learns, it can be killed at any time, and it never mixes two runs."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import small_objective
import torch
from small_objective import NextToken, loop, texts, weights

from whiflash_agents.engine.errors import Change, ChangedError, OutputError, SettingsError
from whiflash_agents.engine.training.checkpoint import Checkpoints, check_known
from whiflash_agents.engine.training.held_out import evaluate, held_out_groups, split_texts
from whiflash_agents.engine.training.loop import StepReport, TrainingLoop
from whiflash_agents.engine.training.objective import Loss
from whiflash_agents.engine.training.schedule import Schedule, TrainSettings
from whiflash_agents.engine.training.texts import TrainingText


def equal(one: TrainingLoop, other: TrainingLoop) -> bool:
    mine, theirs = weights(one), weights(other)
    return all(torch.equal(mine[name], theirs[name]) for name in mine | theirs)


class Killed(Exception):
    pass


def kill_at(step: int) -> Any:
    def told(report: StepReport) -> None:
        if report.step == step:
            raise Killed

    return told


# Learning ----------------------------------------------------------------------------------------


def test_training_learns_and_tells_how_it_goes(tmp_path: Path) -> None:
    reports: list[StepReport] = []
    running = loop(tmp_path, epochs=40, on_step=reports.append, held_out=texts()[:2])
    done = running.run()
    assert done.finished
    assert done.step == done.total == len(reports) == 134  # 40 * 10 texts in threes
    assert [report.step for report in reports] == list(range(1, 135))
    assert done.loss < 0.3 < reports[0].loss
    assert done.figures["accuracy"] > 0.95 > reports[0].figures["accuracy"]
    assert reports[-1].seconds_left == 0 < reports[0].seconds_left
    assert all(report.texts_per_second > 0 for report in reports)
    assert not running.objective.network.training
    assert [point["step"] for point in done.history] == [*range(17, 120, 17), 134]
    assert done.history[-1]["loss"] < done.history[0]["loss"]
    assert done.history[-1]["figures"]["accuracy"] == 1.0


def test_the_rate_warms_up_and_falls_to_nothing() -> None:
    settings = TrainSettings(epochs=10, texts_per_batch=1, warmup=0.2, peak_learning_rate=2.0)
    schedule = Schedule(texts(), settings)
    rates = [schedule.learning_rate(step) for step in range(schedule.total)]
    assert schedule.total == 100
    assert rates[20] == max(rates) == 2.0
    assert all(a < b for a, b in pairwise(rates[:21]))
    assert all(a > b for a, b in pairwise(rates[20:]))
    assert 0 < rates[-1] < 0.002
    assert math.isclose(rates[60], 1.0)


def test_every_epoch_sees_every_text_once_in_an_order_of_its_own() -> None:
    schedule = Schedule(texts(), TrainSettings(epochs=2.5, texts_per_batch=3))
    assert schedule.total == 9
    seen = [text.id for step in range(9) for text in schedule.batch(step)][:25]
    assert set(Counter(seen[:10]).values()) == set(Counter(seen[10:20]).values()) == {1}
    assert len(set(seen[20:])) == 5
    assert seen[:10] != seen[10:20] != [text.id for text in texts()]
    other = Schedule(texts(), TrainSettings(epochs=2.5, texts_per_batch=3, seed=1))
    assert [t.id for t in other.batch(0)] != seen[:3]


def test_draws_are_new_in_every_step_and_the_same_in_every_run() -> None:
    schedule = Schedule(texts(), TrainSettings(seed=3))
    again = Schedule(texts(), TrainSettings(seed=3))
    a, b = texts()[:2]

    def drawn(of: Schedule, step: int, text: TrainingText) -> float:
        return torch.rand(1, generator=of.generator(step, text)).item()

    assert drawn(schedule, 1, a) == drawn(again, 1, a)
    assert len({drawn(schedule, 1, a), drawn(schedule, 2, a), drawn(schedule, 1, b)}) == 3


def test_a_batch_is_the_mean_over_all_its_positions(tmp_path: Path) -> None:
    """One step of plain gradients over two texts is the step of their positions together."""

    class Sgd(TrainingLoop):
        def _new_optimizer(self) -> Any:
            return torch.optim.SGD(self._trained, lr=1.0)

    objective = NextToken()
    some = [texts()[0], texts()[3]]
    settings = TrainSettings(
        epochs=1, texts_per_batch=2, peak_learning_rate=1.0, clip=1e9, warmup=0, autocast="float32"
    )
    running = Sgd(objective, some, settings, tmp_path)
    before = objective.network[1].weight.detach().clone()
    reference = NextToken()
    losses = [reference.loss(t, running.schedule.generator(0, t)) for t in some]
    mean = sum(loss.total for loss in losses) / sum(loss.weight for loss in losses)
    (wanted,) = torch.autograd.grad(mean, [reference.network[1].weight])
    running.run()
    assert torch.allclose(before - objective.network[1].weight, wanted, atol=1e-6)


def test_gradients_are_clipped_by_their_norm(tmp_path: Path) -> None:
    class Sgd(TrainingLoop):
        def _new_optimizer(self) -> Any:
            return torch.optim.SGD(self._trained, lr=1.0)

    settings = TrainSettings(
        epochs=1, texts_per_batch=10, peak_learning_rate=1.0, clip=1e-3, warmup=0
    )
    running = Sgd(NextToken(), texts(), settings, tmp_path)
    before = {name: value.clone() for name, value in weights(running).items()}
    running.run()
    moved = sum((weights(running)[n] - before[n]).square().sum().item() for n in before)
    assert math.isclose(math.sqrt(moved), 1e-3, rel_tol=1e-2)


# Killed and gone on with -------------------------------------------------------------------------


def test_a_run_that_is_killed_and_goes_on_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = loop(tmp_path / "whole")
    told = whole.run()
    assert told.total == 20
    for step in (1, 7, 19):
        folder = tmp_path / f"killed-{step}"
        with pytest.raises(Killed):
            loop(folder, checkpoint_seconds=0, on_step=kill_at(step)).run()
        again = loop(folder)
        done = again.run()
        assert done.finished
        assert done.resumed == step - 1  # a checkpoint is written after the step was told
        assert equal(again, whole)


def test_steps_since_the_last_checkpoint_are_done_again(tmp_path: Path) -> None:
    whole = loop(tmp_path / "whole")
    whole.run()
    loop(tmp_path / "k", max_minutes=1e-9).run()  # one step, and its checkpoint
    with pytest.raises(Killed):
        loop(tmp_path / "k", on_step=kill_at(9)).run()
    again = loop(tmp_path / "k")
    assert again.run().resumed == 1
    assert equal(again, whole)


def test_a_process_that_is_killed_can_be_gone_on_with(tmp_path: Path) -> None:
    whole = loop(tmp_path / "whole")
    whole.run()
    program = subprocess.Popen(
        [sys.executable, small_objective.__file__, str(tmp_path / "k"), "8"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert program.stdout is not None
    for line in program.stdout:
        if line.strip() == "8":
            os.kill(program.pid, signal.SIGKILL)
            break
    assert program.wait() == -signal.SIGKILL
    again = loop(tmp_path / "k")
    assert again.run().resumed == 7
    assert equal(again, whole)


def test_time_that_is_up_ends_with_a_checkpoint_and_the_next_sitting_goes_on(
    tmp_path: Path,
) -> None:
    whole = loop(tmp_path / "whole")
    whole.run()
    sittings = 0
    while True:
        running = loop(tmp_path / "k", max_minutes=1e-9)
        done = running.run()
        sittings += 1
        assert done.step == sittings
        if done.finished:
            break
    assert sittings == 20
    assert equal(running, whole)
    assert done.seconds > 0


def test_a_run_that_is_stopped_keeps_its_last_step(tmp_path: Path) -> None:
    running = loop(tmp_path, on_step=lambda report: running.stop())
    done = running.run()
    assert not done.finished
    assert done.step == 1
    assert loop(tmp_path).run().resumed == 1


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first = loop(tmp_path, held_out=texts()[:1])
    told = first.run()
    again = loop(tmp_path, held_out=texts()[:1])
    done = again.run()
    assert done.finished
    assert done.resumed == done.step == 20
    assert again.objective.seen == []
    assert done.history == told.history
    assert equal(again, first)


# Checkpoints -------------------------------------------------------------------------------------


def stand(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_two_checkpoints_are_kept(tmp_path: Path) -> None:
    loop(tmp_path, checkpoint_seconds=0).run()
    assert stand(tmp_path) == ["step-00000019", "step-00000020"]
    assert stand(tmp_path / "step-00000020") == ["state.json", "state.safetensors"]


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    whole = loop(tmp_path / "whole")
    whole.run()
    for file, left in (("state.safetensors", 50), ("state.json", 20), ("state.safetensors", None)):
        folder = tmp_path / "k"
        with pytest.raises(Killed):
            loop(folder, checkpoint_seconds=0, on_step=kill_at(9)).run()
        path = folder / "step-00000008" / file
        if left is None:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:left])
        again = loop(folder)
        assert again.run().resumed == 7
        assert equal(again, whole)
        shutil.rmtree(folder)


def test_where_no_checkpoint_can_be_read_that_is_told(tmp_path: Path) -> None:
    loop(tmp_path).run()
    (tmp_path / "step-00000020" / "state.json").write_text("{}")
    with pytest.raises(OutputError, match=r"step-00000020: state.json lacks fields.*--restart"):
        loop(tmp_path).run()
    Checkpoints(tmp_path, {}).clear()
    assert stand(tmp_path) == []
    assert loop(tmp_path).run().resumed == 0


def test_leftovers_of_a_crash_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / ".step-00000005-x").mkdir()
    (tmp_path / "step-00000009").write_text("a file")
    assert loop(tmp_path).run().resumed == 0
    Checkpoints(tmp_path, {}).clear()
    assert stand(tmp_path) == ["step-00000009"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peak_learning_rate": 0.01}, r"settings.peak_learning_rate: 0.05, now 0.01"),
        ({"epochs": 7}, r"settings.epochs: 6, now 7"),
        ({"seed": 5}, r"settings.seed: 4, now 5"),
        ({"autocast": "float32"}, r"settings.autocast: 'bfloat16', now 'float32'"),
        ({"identity": {"target": "b"}}, r"target: 'a', now 'b'"),
    ],
)
def test_checkpoints_of_another_run_are_refused(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    loop(tmp_path, identity={"target": "a"}, max_minutes=1e-9).run()
    with pytest.raises(SettingsError, match=told) as error:
        loop(tmp_path, **({"identity": {"target": "a"}} | changes)).run()
    assert "begin anew (--restart)" in str(error.value)
    # These two have no effect on what is learnt.
    loop(tmp_path, identity={"target": "a"}, max_minutes=5, checkpoint_seconds=9).run()


def test_checkpoints_of_other_texts_are_refused(tmp_path: Path) -> None:
    settings = TrainSettings(**small_objective.SETTINGS)
    loop(tmp_path, max_minutes=1e-9).run()
    other = TrainingText("t9", texts()[9].token_ids, ((2, 4),))
    with pytest.raises(SettingsError, match=r"texts\.fingerprint"):
        TrainingLoop(NextToken(), [*texts()[:9], other], settings, tmp_path).run()
    with pytest.raises(SettingsError, match=r"texts\.count: 10, now 9"):
        TrainingLoop(NextToken(), texts()[:9], settings, tmp_path).run()


def test_what_is_known_before_there_are_texts_is_compared_first(tmp_path: Path) -> None:
    assert not check_known(tmp_path, {"target": "b"})  # there is no checkpoint
    identity = {"target": "a", "network": {"size": 3, "mask": 7}}
    running = loop(tmp_path, identity=identity, max_minutes=1e-9)
    running.run()
    assert check_known(tmp_path, {"target": "a", "network": {"size": 3}})
    assert check_known(tmp_path, {"settings": running.settings.decisive()})
    for known, told in (
        ({"target": "b"}, [Change("target", "a", "b")]),
        ({"network": {"size": 4}}, [Change("network.size", 3, 4)]),
        ({"network": {"depth": 1}}, [Change("network.depth", None, 1)]),
    ):
        with pytest.raises(ChangedError) as error:
            check_known(tmp_path, known)
        assert list(error.value.changes) == told
    running.checkpoints.check()
    with pytest.raises(ChangedError):
        loop(tmp_path, identity={"target": "a"}).checkpoints.check()
    (stand_at,) = tmp_path.glob("step-*")
    (stand_at / "state.json").write_text("torn")
    assert not check_known(tmp_path, {"target": "b"})  # `restore` tells of it


def test_a_checkpoint_that_cannot_be_written_is_told_and_the_others_stay(tmp_path: Path) -> None:
    loop(tmp_path / "k", max_minutes=1e-9).run()
    blocked = tmp_path / "file"
    blocked.write_text("mine")
    with pytest.raises(OutputError, match="cannot be written"):
        loop(blocked / "k").run()
    assert blocked.read_text() == "mine"


def test_a_checkpoint_holds_no_pickles_and_says_what_it_is_of(tmp_path: Path) -> None:
    loop(tmp_path, identity={"target": "a"}).run()
    state = json.loads((tmp_path / "step-00000020" / "state.json").read_text())
    assert state["step"] == 20
    assert state["identity"]["target"] == "a"
    assert state["identity"]["texts"]["count"] == 10
    assert (tmp_path / "step-00000020" / "state.safetensors").read_bytes()[8:9] == b"{"


# What is refused ---------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_says_the_step_and_what_to_do(tmp_path: Path) -> None:
    class Breaking(NextToken):
        def loss(self, text: TrainingText, generator: torch.Generator) -> Loss:
            found = super().loss(text, generator)
            if len(self.seen) == 8:
                found.total = found.total * float("nan")
            return found

    settings = TrainSettings(**(small_objective.SETTINGS | {"checkpoint_seconds": 0}))
    running = TrainingLoop(Breaking(), texts(), settings, tmp_path)
    with pytest.raises(SettingsError, match=r"step 3 of 20: the loss of text 't\d' is nan"):
        running.run()
    assert stand(tmp_path) == ["step-00000001", "step-00000002"]


def test_gradients_that_are_not_finite_are_told(tmp_path: Path) -> None:
    class Steep(NextToken):
        def loss(self, text: TrainingText, generator: torch.Generator) -> Loss:
            found = super().loss(text, generator)
            weight = self.network[1].bias.sum()
            found.total = found.total + (weight - weight.detach()).abs().sqrt()  # 0, slope infinite
            return found

    with pytest.raises(SettingsError, match="the gradient's norm is"):
        TrainingLoop(Steep(), texts(), TrainSettings(), tmp_path).run()


def test_texts_with_nothing_to_learn_change_nothing(tmp_path: Path) -> None:
    class Idle(NextToken):
        def loss(self, text: TrainingText, generator: torch.Generator) -> Loss:
            return Loss(super().loss(text, generator).total * 0.0, 0.0)

    running = TrainingLoop(Idle(), texts(), TrainSettings(), tmp_path)
    before = {name: value.clone() for name, value in weights(running).items()}
    assert running.run().finished
    assert all(torch.equal(before[name], value) for name, value in weights(running).items())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"epochs": 0}, "epochs=0: expected a number above 0"),
        ({"texts_per_batch": 0}, "texts_per_batch=0"),
        ({"peak_learning_rate": -1.0}, "peak_learning_rate=-1.0"),
        ({"warmup": 1.0}, "warmup=1.0"),
        ({"autocast": "float16"}, "autocast='float16': expected bfloat16 or float32"),
        ({"max_minutes": 0}, "max_minutes=0"),
        ({"clip": 0}, "clip=0"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        TrainSettings(**changes)


def test_networks_and_texts_that_cannot_be_trained_are_refused(tmp_path: Path) -> None:
    settings = TrainSettings()
    with pytest.raises(SettingsError, match="no text to train on"):
        TrainingLoop(NextToken(), [], settings, tmp_path)
    with pytest.raises(SettingsError, match="two texts have the id 't0'"):
        TrainingLoop(NextToken(), texts()[:1] * 2, settings, tmp_path)
    objective = NextToken()
    objective.network.bfloat16()
    with pytest.raises(SettingsError, match=r"weights in torch.bfloat16; train in float32"):
        TrainingLoop(objective, texts(), settings, tmp_path)
    objective.network.float().requires_grad_(False)
    with pytest.raises(SettingsError, match="no weights with gradients"):
        TrainingLoop(objective, texts(), settings, tmp_path)


# Held out ----------------------------------------------------------------------------------------


def test_a_text_stays_on_its_side_whatever_other_texts_come() -> None:
    many = texts(200)
    train, held = split_texts(many, 0.2)
    assert 20 < len(held) < 60
    assert sorted(t.id for t in (*train, *held)) == sorted(t.id for t in many)
    fewer = split_texts(many[:100], 0.2)
    assert fewer[1] == [text for text in held if text in many[:100]]


def test_texts_of_a_group_go_together() -> None:
    many = texts(60)

    def group(text: TrainingText) -> str:
        return str(int(text.id[1:]) // 3)

    train, held = split_texts(many, 0.3, group=group)
    assert held
    assert not {group(text) for text in train} & {group(text) for text in held}


def test_what_is_held_out_is_known_without_the_texts() -> None:
    for share in (0.0, 0.001, 0.2, 0.5):
        held = split_texts(texts(30), share)[1]
        assert held_out_groups([text.id for text in texts(30)], share) == {t.id for t in held}


def test_both_sides_have_a_text_where_there_are_two() -> None:
    for share in (0.001, 0.5):
        for number in range(12):
            pair = texts(14)[number : number + 2]
            train, held = split_texts(pair, share)
            assert len(train) == len(held) == 1
    assert split_texts(texts(1), 0.0) == (texts(1), [])
    with pytest.raises(SettingsError, match=r"1 trace cannot .* \(--held-out 0\)"):
        split_texts(texts(1), 0.1)
    with pytest.raises(SettingsError, match=r"held_out=0\.7"):
        split_texts(texts(), 0.7)


def test_evaluating_draws_the_same_each_time_and_leaves_training_as_it_was(tmp_path: Path) -> None:
    objective = NextToken()
    objective.network.train()
    one, other = (evaluate(objective, texts(), seed=1) for _ in range(2))
    assert one.as_dict() == other.as_dict()
    assert evaluate(objective, texts(), seed=2).loss != one.loss
    assert objective.network.training
    assert objective.network[1].weight.grad is None
    watched, alone = loop(tmp_path / "a", held_out=texts()[:2]), loop(tmp_path / "b")
    watched.run()
    alone.run()
    assert equal(watched, alone)
