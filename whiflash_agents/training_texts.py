"""From traces to texts that drafters are trained on.

A drafter learns to say what its target says, so what teaches it best is the target's own answer to
every recorded history (`regenerated_texts`). Where there is no time for that, or the recordings are
the target's own, the recorded turns serve as they are (`recorded_texts`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whiflash_agents.batch.figures import RunFigures
from whiflash_agents.batch.order import RowOrder
from whiflash_agents.batch.plan import InputCount, Row, TracePlan, plan_rows, plan_trace
from whiflash_agents.batch.session import EngineSession, build_session
from whiflash_agents.batch.session_spec import Models, SessionSpec
from whiflash_agents.engine.errors import SettingsError, TraceError
from whiflash_agents.engine.training.texts import TrainingText
from whiflash_agents.response_file import Response, ResponseFile
from whiflash_agents.settings import Settings
from whiflash_agents.traces import Message, Trace, read_traces
from whiflash_agents.training_progress import counted
from whiflash_agents.wanted_turns import WantedTurns, trace_of_row

if TYPE_CHECKING:
    from whiflash_agents.batch.progress import Progress
    from whiflash_agents.chat import Chat
    from whiflash_agents.engine.target import Target
    from whiflash_agents.models import ModelFiles

CONCURRENCY = 32  # turns generated at once: many more than when somebody waits for the first one
_ROWS_PER_SLOT = 2
_POLL_SECONDS = 0.5
# What is told of a response, not what is in it.
_NOT_DECISIVE = {"logprobs", "top_logprobs"}


@dataclass(slots=True)
class TextSet:
    """Texts, in the order of the traces.

    Attributes:
        left_out: turns that made no text, by reason.
        seconds: that generating took in this process.
        generated: responses that were generated in this process; the others were there.
    """

    texts: list[TrainingText] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    generated: int = 0

    @property
    def num_response_tokens(self) -> int:
        return sum(text.num_response_tokens for text in self.texts)


def trace_of(text: TrainingText) -> str:
    """The id of the trace that a text is of: texts of one trace share their beginning, so they
    are held out together."""
    return trace_of_row(text.id)


# The target's own answers ------------------------------------------------------------------------


def responses_depend_on(settings: Settings, target: Target) -> dict[str, Any]:
    """All but the prompt that decides what the target answers, for the first line of a file of
    responses. (Prompts stand beside the responses and are compared one by one.)"""
    from whiflash_agents.engine.training.identity import target_fingerprint

    return {
        "target": target_fingerprint(target),
        "seed": settings.sampling.seed,
        **{k: v for k, v in settings.sampling.params().items() if k not in _NOT_DECISIVE},
    }


def regenerated_texts(
    traces: Sequence[str | Path],
    settings: Settings,
    models: Models,
    model: ModelFiles,
    path: str | Path,
    *,
    concurrency: int = CONCURRENCY,
    max_length: int | None = None,
    progress: Progress,
    check: Callable[[WantedTurns], None] = lambda wanted: None,
) -> TextSet:
    """Let the target answer every turn of `traces`, and make a text of each answer.

    Args:
        settings: sampling, limits, and which turns: as for a run.
        models: the target and its chat format.
        path: file of responses; those that it holds are not generated again.
        max_length: longest text; turns whose text would be longer are left out.
        progress: is told how far it is.
        check: is told what is wanted before anything is generated, and may refuse it.

    Raises:
        What `check` raises.
        SettingsError, OutputError: the file cannot be gone on with (`ResponseFile`), or holds
            responses to other prompts.
        TraceError: a trace cannot be read.
    """
    found = TextSet()
    depends = responses_depend_on(settings, models.target)
    with ResponseFile(path, depends) as file:
        there = len(file.responses)
        if there:
            is_there = "response is" if there == 1 else "responses are"
            progress.phase(f"{there:,} {is_there} in {file.path} already")
        wanted = WantedTurns(depends)
        _survey(_plans(traces, settings), models.chat, file, max_length, found, wanted)
        try:
            check(wanted)
        except SettingsError:
            tell_left_out(found, progress)  # which may be why
            raise
        if wanted.missing:
            session = build_session(_spec(settings, model, concurrency), models)
            plans = _missing(_plans(traces, settings), wanted)
            _generate(plans, session, file, found, progress, concurrency)
        for row_id in wanted.prompts:
            response = file.responses.get(row_id)
            if response is None:
                continue  # it failed, and was counted
            text = _text(row_id, response.prompt_ids, response.token_ids)
            if max_length is not None and len(text.token_ids) > max_length:
                found.left_out[f"longer than {max_length} tokens"] += 1
            else:
                found.texts.append(text)
    return found


def _plans(traces: Sequence[str | Path], settings: Settings) -> Iterator[TracePlan]:
    run = settings.run
    return plan_rows(
        read_traces(list(traces), format=run.format, limit=run.limit),
        run.mode,
        seed=settings.sampling.seed,
        params=settings.sampling.params(),
    )


def _survey(
    plans: Iterator[TracePlan],
    chat: Chat,
    file: ResponseFile,
    max_length: int | None,
    found: TextSet,
    wanted: WantedTurns,
) -> None:
    """Read the prompts of all rows: which are wanted, and which of them are still to be generated.
    All of them before the first is generated, because what is wrong with the last is to be told
    now."""
    for row in (row for plan in plans for row in plan.rows):
        messages = [Message.model_validate(message) for message in row.messages]
        try:
            prompt = tuple(chat.prompt_ids(messages, row.tools))
        except Exception:  # the session tells, row by row, what its template refuses
            prompt = ()
        response = file.responses.get(row.id)
        if response is not None and response.prompt_ids != prompt:
            raise SettingsError(
                f"{file.path} holds a response to another prompt under the id {row.id!r}: the "
                "trace, or the model's chat template, is not the one that it was generated from; "
                "name another file (--responses)"
            )
        if max_length is not None and len(prompt) >= max_length:
            found.left_out[f"longer than {max_length} tokens"] += 1
        else:
            wanted.add(row.id, prompt, missing=response is None)


def _missing(plans: Iterator[TracePlan], wanted: WantedTurns) -> Iterator[TracePlan]:
    """The rows that are still to be generated, trace by trace."""
    for plan in plans:
        rows = [row for row in plan.rows if row.id in wanted.missing]
        if rows:
            yield TracePlan(plan.trace_id, len(rows), iter(rows))


def _spec(settings: Settings, model: ModelFiles, concurrency: int) -> SessionSpec:
    engine = settings.engine.model_copy(update={"router": "lookup", "concurrency": concurrency})
    routing = settings.routing.model_copy(update={"verify_budget": "auto"})
    run = settings.run.model_copy(update={"rounds": False})
    sections = {"engine": engine, "routing": routing, "run": run}
    return SessionSpec.of(settings.model_copy(update=sections), model)


def _generate(
    plans: Iterator[TracePlan],
    session: EngineSession,
    file: ResponseFile,
    found: TextSet,
    progress: Progress,
    concurrency: int,
) -> None:
    """Generate all rows of `plans`; each is in `file` as soon as it is finished."""
    order = RowOrder(plans, capacity=_ROWS_PER_SLOT * concurrency, slots=concurrency)
    figures = RunFigures(input=InputCount())
    rows: dict[str, Row] = {}
    started = time.monotonic()
    while True:
        while (row := order.next_row()) is not None:
            rows[row.id] = row
            session.submit(row)
            figures.input.rows += 1
        if not order.in_flight:
            break
        for output in session.advance(_POLL_SECONDS):
            order.accept(output)
            figures.add(output)
            row = rows.pop(output["custom_id"])
            if output["response"] is None:
                found.left_out[f"{output['error']['type']}: {output['error']['message']}"] += 1
                continue
            file.add(_response(session, row, output))
            found.generated += 1
        for _ in order.ready():
            pass  # the order of the file does not matter
        figures.running_seconds = time.monotonic() - started
        figures.engines = [session.describe()]
        progress.update(figures)
    found.seconds = time.monotonic() - started


def _response(session: EngineSession, row: Row, output: dict[str, Any]) -> Response:
    request, _ = session.request_of(row)
    return Response(
        row.id,
        tuple(request.prompt_ids),
        tuple(output["whiflash"]["token_ids"]),
        output["response"]["body"]["choices"][0]["finish_reason"],
    )


# Recorded turns ----------------------------------------------------------------------------------


def recorded_texts(
    traces: Sequence[str | Path],
    settings: Settings,
    chat: Chat,
    *,
    max_length: int | None = None,
) -> TextSet:
    """Texts whose responses are the recorded turns, as the model would have written them.

    Turns of one trace stand in one text wherever the prompt of a turn begins with the turns before
    it, as most chat templates have it.

    Args:
        max_length: longest text; turns that do not fit are left out.

    Raises:
        SettingsError: a mode without recorded turns.
        TraceError: a trace cannot be read.
    """
    run = settings.run
    check_recorded(run.mode)
    found = TextSet()
    for trace in read_traces(list(traces), format=run.format, limit=run.limit):
        found.texts += _texts_of(trace, settings, chat, max_length, found)
    return found


def check_recorded(mode: str) -> None:
    """Refuse a mode of runs that has no recorded turns.

    Raises:
        SettingsError: it is one.
    """
    if mode != "replay":
        raise SettingsError(
            f"mode={mode!r} writes turns that no trace holds; with --no-regenerate use mode replay"
        )


def _texts_of(
    trace: Trace, settings: Settings, chat: Chat, max_length: int | None, found: TextSet
) -> list[TrainingText]:
    texts: list[TrainingText] = []
    plan = plan_trace(trace, "replay", seed=settings.sampling.seed, params={})
    for row in plan.rows:
        messages = [Message.model_validate(message) for message in row.messages]
        turn = Message.model_validate(row.recorded)
        try:
            prompt = tuple(chat.prompt_ids(messages, row.tools))
        except Exception as error:  # templates raise what they like; that is this turn's end
            found.left_out[f"{type(error).__name__}: {error}"] += 1
            continue
        output = tuple(chat.turn_ids(messages, row.tools, turn))
        if not output:
            found.left_out["the chat template cannot write the recorded turn"] += 1
            continue
        text = _text(row.id, prompt, output)
        if max_length is not None and len(text.token_ids) > max_length:
            found.left_out[f"longer than {max_length} tokens"] += 1
            continue
        last = texts[-1] if texts else None
        if last is not None and prompt[: len(last.token_ids)] == last.token_ids:
            joined = last.responses + text.responses
            texts[-1] = replace(last, token_ids=text.token_ids, responses=joined)
        else:
            texts.append(text)
    return texts


def _text(row_id: str, prompt: Sequence[int], output: Sequence[int]) -> TrainingText:
    return TrainingText(row_id, (*prompt, *output), ((len(prompt), len(prompt) + len(output)),))


def tell_left_out(found: TextSet, progress: Progress) -> None:
    """Tell how many turns made no text, and the commonest reasons."""
    for reason, count in found.left_out.most_common(3):
        progress.phase(f"{counted(count, 'turn')} left out: {reason}")


def check_texts(found: TextSet) -> None:
    """Refuse a set without texts, with the commonest reason.

    Raises:
        TraceError: there is none.
    """
    if found.texts:
        return
    reason, count = next(iter(found.left_out.most_common(1)), ("there is no assistant turn", 0))
    if not count:
        raise TraceError(f"these traces give no text to train on: {reason}")
    raise TraceError(
        "these traces give no text to train on; of "
        f"{counted(found.left_out.total(), 'turn')} left out, {count}: {reason}"
    )
