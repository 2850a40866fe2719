"""Training a drafter for a target from traces: `train eagle3` and `train dflash`, and heads.

Traces become texts (`training_texts.py`), texts a network (`drafter_kinds.py`, `head_kinds.py`,
and the loop in `engine/training/`), and the network a folder in the public format that every engine
loads, with a model card. Each stage goes on where an earlier sitting ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whiflash_agents.batch.inputs import readable_twice
from whiflash_agents.batch.plan import check_input, row_seed
from whiflash_agents.batch.session_spec import Models, SessionSpec
from whiflash_agents.drafter_acceptance import measure_acceptance
from whiflash_agents.drafter_kinds import NewNetwork, describe, draft_coverage
from whiflash_agents.drafter_plan import COMPUTED, TrainedDrafter, TrainingPlan
from whiflash_agents.engine.errors import TraceError
from whiflash_agents.engine.request import SamplingParams
from whiflash_agents.head_kinds import heads_of
from whiflash_agents.models import resolve_drafter, resolve_model
from whiflash_agents.settings import Settings
from whiflash_agents.training_folder import TrainingFolder
from whiflash_agents.training_progress import counted
from whiflash_agents.training_texts import (
    TextSet,
    check_texts,
    recorded_texts,
    regenerated_texts,
    tell_left_out,
    trace_of,
)
from whiflash_agents.wanted_turns import TurnCheck, WantedTurns

if TYPE_CHECKING:
    from whiflash_agents.engine.training.feature_source import FeatureSource
    from whiflash_agents.engine.training.loop import TrainingLoop
    from whiflash_agents.engine.training.texts import TrainingText
    from whiflash_agents.models import ModelFiles
    from whiflash_agents.training_progress import TrainingProgress

RESPONSES = "responses.jsonl"
_LEAST_COVERAGE = 0.9  # of a draft vocabulary; the usual ones have 95 % and more
_MEASURED = 48  # held-out texts whose acceptance is measured, which takes a draft at every token


class DrafterTraining:
    """One sitting of training a drafter.

    Args:
        settings: target, sampling and limits, as for a run.
        plan: what is to be trained.
        progress: is told how far it is.

    Raises:
        SettingsError: a value that cannot be, or that would be ignored.
    """

    def __init__(
        self, settings: Settings, plan: TrainingPlan, *, progress: TrainingProgress
    ) -> None:
        from whiflash_agents.engine.training.schedule import TrainSettings

        plan.check_mode(settings.run.mode)
        init = None if plan.init is None else Path(plan.init)
        plan.network.check(NewNetwork(init, plan.warm_start))
        self._train_settings = TrainSettings(
            epochs=plan.epochs,
            texts_per_batch=plan.texts_per_batch,
            peak_learning_rate=plan.learning_rate,
            seed=settings.sampling.seed,
            max_minutes=plan.minutes,
            checkpoint_seconds=60.0 * plan.checkpoint_minutes,
        )
        self.settings = settings
        self.plan = plan
        self._progress = progress
        self._loop: TrainingLoop | None = None

    def stop(self) -> bool:
        """End training after the step at hand, to be gone on with; False where there is none to
        end. Safe to call from a signal handler."""
        if self._loop is None:
            return False
        self._loop.stop()
        return True

    def run(self, traces: Sequence[str | Path]) -> TrainedDrafter:
        """Train to the end, or until time is up or `stop` is called.

        Raises:
            TraceError, OutputError, SettingsError, ModelNotFoundError, CheckpointError: each says
                what is wrong and what to do; what was done is kept.
        """
        try:
            folder = TrainingFolder(self.plan.output, self.plan.init)
            with readable_twice(traces) as paths, folder.locked():
                return self._run(paths, [str(trace) for trace in traces], folder)
        finally:
            self._loop = None
            self._progress.close()

    def _run(
        self, paths: Sequence[Path], names: list[str], folder: TrainingFolder
    ) -> TrainedDrafter:
        from whiflash_agents.drafter_card import model_card
        from whiflash_agents.engine.training.checkpoint import check_known
        from whiflash_agents.engine.training.loop import TrainingLoop

        plan, settings = self.plan, self.settings
        self._progress.phase("checking the input")
        run = settings.run
        there = check_input(paths, run.mode, format=run.format, limit=run.limit, names=names)
        self._check_traces(there.traces - there.traces_without_turns)
        self._progress.phase("finding the model")
        model = resolve_model(settings.model.target, settings.model.adapter)
        init = None if plan.init is None else resolve_drafter(plan.init, plan.network.family)
        self._progress.phase(f"loading {model.name}")
        models = Models.load(self._spec(model))
        begin = NewNetwork(init, plan.warm_start, settings.sampling.seed)
        # A target in bfloat16 is on a machine that is faster in it.
        in_bfloat16 = models.machine["dtype"] == "bfloat16"
        train_settings = replace(
            self._train_settings, autocast="bfloat16" if in_bfloat16 else "float32"
        )
        # What cannot be is told now, not after hours of generating.
        trial = plan.network.new_network(models.target, [], models.chat, begin)
        source = self._source(models, trial)
        plan.network.new_objective(trial, models.target, source)
        longest = plan.network.longest_text(trial, models.target)
        known = {"settings": train_settings.decisive(), **self._identity(models, trial, begin)}
        known = _without(known, plan.network.follows_texts)
        del trial
        begun = not plan.restart and check_known(folder.state, known)
        turns = TurnCheck(folder.state if begun else None, plan.held_out)
        texts = self._texts(paths, models, model, longest, turns.check)
        train, held_out = self._split(texts.texts)
        self._check_room(source, [*train, *held_out])
        network = plan.network.new_network(models.target, train, models.chat, begin)
        covered = self._tell_coverage(network, train)
        self._loop = TrainingLoop(
            plan.network.new_objective(network, models.target, source),
            train,
            train_settings,
            folder.state,
            identity=self._identity(models, network, begin),
            held_out=held_out,
            on_step=self._progress.step,
            on_held_out=self._progress.held_out,
        )
        if plan.restart:
            self._loop.checkpoints.clear()
        self._loop.checkpoints.check()
        turns.keep(folder.state)
        self._progress.phase(
            f"{plan.network.kind} with {describe(network)['weights']:,} weights, "
            f"{counted(self._loop.schedule.total, 'step')}"
        )
        training = self._loop.run()
        self._loop = None
        outcome = TrainedDrafter(
            plan,
            settings,
            model.name,
            names,
            there,
            texts,
            len(train),
            len(held_out),
            describe(network),
            training,
            models.machine,
            coverage=covered,
            heads=heads_of(network),
        )
        if training.finished:
            self._save(folder, models, network)
            self._measure(outcome, models, held_out)
            folder.write_card(model_card(outcome))
        return outcome

    def _spec(self, model: ModelFiles) -> SessionSpec:
        engine = self.settings.engine.model_copy(update={"router": "none"})
        return SessionSpec.of(self.settings.model_copy(update={"engine": engine}), model)

    def _identity(self, models: Models, network: Any, begin: NewNetwork) -> dict[str, Any]:
        """What decides what is learnt, beside the texts and the settings of the loop."""
        from whiflash_agents.engine.training.identity import target_fingerprint

        return {
            "target": target_fingerprint(models.target),
            "drafter": self.plan.network.identity(),
            "network": describe(network),
            "begin": begin.told_of(network),
        }

    # Data ------------------------------------------------------------------------------------

    def _check_traces(self, count: int) -> None:
        """Refuse too few traces that have a turn, before a model is loaded."""
        from whiflash_agents.engine.training.held_out import held_out_groups

        if not count:
            raise TraceError(
                "there is no assistant turn in these traces, so nothing to train on; give others"
            )
        held_out_groups(map(str, range(count)), self.plan.held_out)

    def _texts(
        self,
        paths: Sequence[Path],
        models: Models,
        model: ModelFiles,
        longest: int,
        check: Callable[[WantedTurns], None],
    ) -> TextSet:
        plan, settings = self.plan, self.settings
        if plan.max_length is not None:
            longest = min(plan.max_length, longest)
        if plan.regenerate:
            file = self.plan.responses or plan.output.parent / RESPONSES
            self._progress.phase(f"generating responses, kept in {file}")
            found = regenerated_texts(
                paths,
                settings,
                models,
                model,
                file,
                concurrency=plan.concurrency,
                max_length=longest,
                progress=self._progress,
                check=check,
            )
        else:
            self._progress.phase("reading recorded turns")
            found = recorded_texts(paths, settings, models.chat, max_length=longest)
        check_texts(found)
        tell_left_out(found, self._progress)
        self._progress.phase(
            f"{counted(len(found.texts), 'text')} with "
            f"{counted(found.num_response_tokens, 'response token')}"
        )
        return found

    def _split(
        self, texts: Sequence[TrainingText]
    ) -> tuple[list[TrainingText], list[TrainingText]]:
        from whiflash_agents.engine.training.held_out import split_texts

        train, held_out = split_texts(texts, self.plan.held_out, group=trace_of)
        self._progress.phase(
            f"training on {counted(len(train), 'text')}, {len(held_out):,} held out"
        )
        return train, held_out

    def _source(self, models: Models, network: Any) -> FeatureSource:
        from whiflash_agents.engine.training.feature_cache import CachedFeatures
        from whiflash_agents.engine.training.feature_source import ComputedFeatures

        computed = ComputedFeatures(models.target, network.config.feature_layers)
        if self.plan.features == COMPUTED:
            return computed
        return CachedFeatures(computed, self.plan.features)

    def _check_room(self, source: FeatureSource, texts: Sequence[TrainingText]) -> None:
        from whiflash_agents.engine.memory import size_text
        from whiflash_agents.engine.training.feature_cache import CachedFeatures

        if isinstance(source, CachedFeatures):
            needed = source.check_room(texts)
            self._progress.phase(
                f"features are kept in {source.folder}; "
                + (f"{size_text(needed)} are still to be written" if needed else "all are there")
            )

    def _tell_coverage(self, network: Any, texts: Sequence[TrainingText]) -> float | None:
        """Tell what the drafter can say of `texts`, and warn where that is little."""
        share = draft_coverage(network, texts)
        if share is not None:
            self._progress.phase(
                f"the draft vocabulary has {100 * share:.1f} % of the response tokens trained on"
            )
            if share < _LEAST_COVERAGE:
                remedy = (
                    "give more tokens (--draft-vocab)"
                    if self.plan.init is None
                    else "it is that of the drafter begun with (--init); a new one may have more"
                )
                self._progress.phase(
                    "warning: no draft gets past a token that the draft vocabulary lacks, which "
                    f"is one in {1 / (1 - share):.1f}; {remedy}"
                )
        return share

    # What is left behind ---------------------------------------------------------------------

    def _save(self, folder: TrainingFolder, models: Models, network: Any) -> None:
        self._progress.phase(f"writing {folder.path}")
        network.to(models.target.dtype)  # what it is loaded in, and half the size in bfloat16
        folder.place(lambda path: self.plan.network.save(network, path))

    def _measure(
        self, outcome: TrainedDrafter, models: Models, held_out: Sequence[TrainingText]
    ) -> None:
        """Measure the drafter as it was saved: what others will load."""
        if not held_out:
            return
        step = max(1, -(-len(held_out) // _MEASURED))
        measured = held_out[::step]
        self._progress.phase(f"measuring acceptance on {counted(len(measured), 'held-out text')}")
        outcome.measured = len(measured)
        outcome.acceptance = measure_acceptance(
            models.target,
            self.plan.network.drafters(self.plan.output, models.target, self.settings.drafters),
            measured,
            models.chat,
            sampling=self._sampling,
            max_draft_nodes=self.settings.drafters.max_draft_nodes,
        )

    def _sampling(self, text: TrainingText) -> SamplingParams:
        """How the target wrote `text`; recorded turns are not its own, so there is no noise to
        couple drafts to."""
        if not self.plan.regenerate:
            return SamplingParams()
        sampling = self.settings.sampling
        return SamplingParams(**sampling.params(), seed=row_seed(sampling.seed, text.id))


def _without(identity: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A nested mapping without the entries of these dotted names."""
    kept = dict(identity)
    for name in names:
        first, _, rest = name.partition(".")
        if rest:
            kept[first] = _without(kept[first], [rest])
        else:
            del kept[first]
    return kept
