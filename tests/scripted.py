"""A chat format and an engine that follow a script, for tests of the floors above the engine.

A token is the code point of a character, the prompt is the history as text, and what the "model"
answers is looked up in a script by the last user message.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whiflash_agents.batch.session import EngineSession
from whiflash_agents.batch.session_spec import SessionSpec
from whiflash_agents.chat import InvalidToolCall, Span, Turn
from whiflash_agents.engine.errors import RequestError
from whiflash_agents.engine.request import (
    Event,
    FinishReason,
    GenerationResult,
    Request,
    TokenLogprob,
)
from whiflash_agents.engine.telemetry import RoundRecord, SpeculationStats
from whiflash_agents.traces import Message, ToolCall

END = 0
MAX_CONTEXT = 400


class ScriptedChat:
    """`<think>...</think>` is reasoning, `CALL name {json}` is a tool call, the rest is content."""

    shows_tools = True

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        if any(message.content == "REFUSED" for message in messages):
            raise RequestError("the chat template refuses this conversation")
        if any(message.content == "BROKEN" for message in messages):
            raise ZeroDivisionError("template divided by zero")
        return [ord(c) for c in "".join(f"{m.role}:{m.content}\n" for m in messages)]

    def turn_ids(self, messages: Any, tools: Any, turn: Message) -> list[int]:
        if turn.content == "UNWRITABLE":
            return []
        return [*map(ord, turn.content or ""), END]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def parse(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], *, tools: Sequence[Any] = ()
    ) -> Turn:
        turn = Turn()
        text = self.decode([t for t in token_ids if t != END])
        at = 0
        if text.startswith("<think>"):
            end = text.index("</think>") + len("</think>")
            turn.reasoning_content = text[len("<think>") : end - len("</think>")]
            turn.spans.append(Span("reasoning", 0, end))
            at = end
        for part in text[at:].split("\n"):
            kind = "tool_call" if part.startswith("CALL ") else "content"
            if kind == "tool_call":
                name, _, arguments = part.removeprefix("CALL ").partition(" ")
                try:
                    turn.tool_calls.append(ToolCall(name=name, arguments=json.loads(arguments)))
                except ValueError as error:
                    turn.invalid_tool_calls.append(
                        InvalidToolCall(name, arguments, part, str(error))
                    )
            elif part:
                turn.content = (turn.content or "") + part
            stop = min(at + len(part) + 1, len(token_ids))
            if stop > at:
                turn.spans.append(Span(kind, at, stop))
            at = stop
        if turn.spans:
            turn.spans[-1] = Span(turn.spans[-1].kind, turn.spans[-1].start, len(token_ids))
        return turn


@dataclass
class Totals:
    output_tokens: int = 0
    positions_prefilled: int = 0


@dataclass
class _Sequence:
    request: Request
    answer: list[int]
    tokens: list[int] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)


class ScriptedEngine:
    """Answers from `script` (last user message -> text), two tokens per step and sequence.

    `log` holds what happened: ("add", id), ("end", id). `delays` are steps a sequence waits.
    """

    def __init__(
        self,
        script: Mapping[str, str] | Callable[[str], str],
        *,
        delays: Mapping[str, int] | None = None,
        step_seconds: float = 0.0,
    ) -> None:
        self.totals = Totals()
        self.log: list[tuple[str, str]] = []
        self.requests: list[Request] = []
        self.most_running = 0
        self._script = script
        self._delays = dict(delays or {})
        self._step_seconds = step_seconds
        self._running: list[_Sequence] = []

    def add(self, request: Request) -> None:
        prompt = "".join(map(chr, request.prompt_ids))
        asked = prompt.rsplit("user:", 1)[-1].split("\n", 1)[0]
        answer = self._script(asked) if callable(self._script) else self._script.get(asked, "ok")
        self.log.append(("add", request.id))
        self.requests.append(request)
        self.totals.positions_prefilled += len(request.prompt_ids)
        self._running.append(_Sequence(request, [*map(ord, answer), END]))
        self.most_running = max(self.most_running, len(self._running))

    def step(self) -> list[Event]:
        time.sleep(self._step_seconds)
        events = []
        for sequence in list(self._running):
            request = sequence.request
            if self._delays.get(request.id, 0) > 0:
                self._delays[request.id] -= 1
                continue
            if request.prompt_ids[-6:-1] == [*map(ord, "CRASH")]:
                raise ArithmeticError("the device is gone")
            position = len(sequence.tokens)
            new = sequence.answer[position : position + 2][: request.sampling.max_tokens - position]
            sequence.tokens += new
            self.totals.output_tokens += len(new)
            if position:
                sequence.stats.rounds.append(
                    RoundRecord(position, "lookup", 2, len(new) - 1, len(new), round_seconds=0.5)
                )
            result = self._result(sequence)
            if result is not None:
                self._running.remove(sequence)
                self.log.append(("end", request.id))
            events.append(Event(request.id, new, result=result))
        return events

    def _result(self, sequence: _Sequence) -> GenerationResult | None:
        params, tokens = sequence.request.sampling, sequence.tokens
        text = "".join(map(chr, tokens))
        reason: FinishReason | None = None
        stop: str | None = next((stop for stop in params.stop if stop in text), None)
        if stop is not None:
            reason, text = "stop", text[: text.index(stop)]
        elif tokens[-1] == END:
            reason = "stop"
        elif len(tokens) >= params.max_tokens:
            reason = "length"
        if text.startswith("EXPLODE"):
            reason = "error"
        if reason is None:
            return None
        logprobs = [TokenLogprob(t, -float("inf"), ((t, -0.5),)) for t in tokens]
        return GenerationResult(
            id=sequence.request.id,
            prompt_tokens=len(sequence.request.prompt_ids),
            cached_tokens=1,
            token_ids=tokens,
            finish_reason=reason,
            stop_reason=stop,
            text=text if params.stop else None,
            logprobs=logprobs if params.logprobs else None,
            seed=params.seed or 0,
            stats=sequence.stats,
            seconds=1.5,
            error="no token is allowed" if reason == "error" else None,
        )


def spec(**changes: Any) -> SessionSpec:
    values: dict[str, Any] = {
        "path": Path("nowhere"),
        "name": "scripted",
        "chat_template": None,
        "response_template": None,
        "device": "cpu",
        "dtype": "float32",
        "router": "none",
        "concurrency": 2,
        "kv_tokens": None,
        "prefill_chunk": 16,
        "recorded_drafts": True,
        "rounds": False,
    }
    values["arms"] = tuple({changes.get("router", "none")} - {"none"})
    return SessionSpec(**(values | changes))


def session(engine: ScriptedEngine, **changes: Any) -> EngineSession:
    return EngineSession(
        engine,
        ScriptedChat(),  # type: ignore[arg-type]
        spec(**changes),
        max_context=MAX_CONTEXT,
        machine={"device": "cpu"},
    )


def echo_session(spec: SessionSpec) -> EngineSession:
    """A loader for runners: every answer repeats the question."""
    engine = ScriptedEngine(lambda asked: f"echo {asked}")
    return EngineSession(
        engine,
        ScriptedChat(),  # type: ignore[arg-type]
        spec,
        max_context=MAX_CONTEXT,
        machine={"device": spec.device, "threads": spec.threads},
    )


def conversation(*contents: str) -> list[dict[str, str]]:
    """user, assistant, user, assistant, ..."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def write_traces(path: Path, traces: Mapping[str, Sequence[str]]) -> Path:
    """A JSONL file of conversations, by trace id."""
    lines = [
        json.dumps({"id": trace_id, "messages": conversation(*contents)})
        for trace_id, contents in traces.items()
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
