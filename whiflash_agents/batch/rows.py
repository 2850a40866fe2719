"""Output rows: one JSON object per generated turn, in the envelope of OpenAI's Batch API.

Rows hold no clock and no random id, so that two runs of the same settings agree: ids are hashes of
the row's id, `created` is always 0 (readers of the envelope demand the field), and times stand
only where `generated_part` leaves them out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import orjson

from whiflash_agents.engine.request import GenerationResult, TokenLogprob
from whiflash_agents.engine.telemetry import RoundRecord, summarise
from whiflash_agents.traces import Message, ToolCall

from .plan import Row

if TYPE_CHECKING:
    from whiflash_agents.chat import Chat, Span, Turn

_SPAN_FIGURES = (
    "mean_acceptance_length",
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
)
# OpenAI's stand-in for the log-probability of a token that cannot occur; JSON has no -inf.
_LEAST_LOGPROB = -9999.0


def output_row(
    row: Row,
    result: GenerationResult,
    chat: Chat,
    *,
    prompt_ids: Sequence[int],
    model: str,
    notes: Sequence[str] = (),
    rounds: bool = False,
) -> dict[str, Any]:
    """The output row of a finished generation.

    `notes` says what was done differently from what was asked (max_tokens lowered, recorded turn
    not used for drafting). `rounds` adds one record per decoding round.
    """
    turn = chat.parse(prompt_ids, result.token_ids, tools=row.tools)
    if isinstance(result.stop_reason, str) and result.text is not None:
        _drop_stop_text(turn, chat.decode(result.token_ids)[len(result.text) :])
    stats = result.stats
    calls = [_tool_call(row.id, index, call) for index, call in enumerate(turn.tool_calls)]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": turn.content,
        "reasoning_content": turn.reasoning_content,
    }
    if calls:  # absent rather than empty, as OpenAI writes it: an empty list is refused as history
        message["tool_calls"] = calls
    finish_reason = "tool_calls" if calls and result.finish_reason == "stop" else None
    reasoning = sum(span.end - span.start for span in turn.spans if span.kind == "reasoning")
    accepted = stats.num_accepted_draft_tokens
    body = {
        "id": "chatcmpl-" + _hash("completion", row.id),
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [
            {
                "index": 0,
                "finish_reason": finish_reason or result.finish_reason,
                "message": message,
                "logprobs": _logprobs(result.logprobs, chat),
            }
        ],
        "usage": {
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": len(result.token_ids),
            "total_tokens": result.prompt_tokens + len(result.token_ids),
            "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": reasoning,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": stats.num_draft_tokens - accepted,
            },
        },
    }
    extra: dict[str, Any] = {
        "trace_id": row.trace_id,
        "turn": row.turn,
        "seed": row.seed,
        "token_ids": result.token_ids,
        "spans": [asdict(span) for span in turn.spans],
        "invalid_tool_calls": [asdict(call) for call in turn.invalid_tool_calls],
        "speculative_decoding": stats.as_dict() | {"by_span": by_span(stats.rounds, turn.spans)},
        "agreement": agreement(turn, row.recorded),
        "stop_reason": result.stop_reason,
        "notes": [*notes, *stats.notes],
        "seconds": result.seconds,
        "round_seconds": sum(record.round_seconds for record in stats.rounds),
    }
    if rounds:
        extra["rounds"] = [asdict(record) for record in stats.rounds]
    return _envelope(row, response=body, error=None, extra=extra)


def failed_row(row: Row, kind: str, message: str, *, retriable: bool) -> dict[str, Any]:
    """The output row of a turn that was not generated. `kind` is the name of the error's class."""
    error = {"type": kind, "message": message, "attempts": 1, "retriable": retriable}
    extra = {"trace_id": row.trace_id, "turn": row.turn, "seed": row.seed}
    return _envelope(row, response=None, error=error, extra=extra)


def _envelope(
    row: Row,
    *,
    response: dict[str, Any] | None,
    error: dict[str, Any] | None,
    extra: dict[str, Any],
) -> dict[str, Any]:
    answer = None
    if response is not None:
        answer = {
            "status_code": 200,
            "request_id": "req_" + _hash("request", row.id),
            "body": response,
        }
    return {
        "id": "batch_req_" + _hash("row", row.id),
        "custom_id": row.id,
        "response": answer,
        "error": error,
        "whiflash": extra,
    }


def encode_row(output: dict[str, Any]) -> bytes:
    """One line of the output file, newline included; non-ASCII text stays as it is.

    What orjson refuses (lone surrogates, integers beyond 64 bits) is written by the standard
    library with ASCII escapes: every row has a line.
    """
    try:
        return orjson.dumps(output, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        return json.dumps(output, separators=(",", ":")).encode() + b"\n"


def generated_part(output: dict[str, Any]) -> dict[str, Any]:
    """What a row says about the turn itself, without how and how fast it was made.

    Two runs with the same model, traces, sampling and seed agree in it, whatever their router,
    batch composition or workers (method: drafter-invariance). Left out are times, speculation
    figures, prefix reuse and notes.
    """
    extra = {
        key: value
        for key, value in output["whiflash"].items()
        if key not in {"seconds", "round_seconds", "rounds", "speculative_decoding", "notes"}
    }
    response = output["response"]
    if response is not None:
        usage = response["body"]["usage"]
        counts = {key: usage[key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
        counts["reasoning_tokens"] = usage["completion_tokens_details"]["reasoning_tokens"]
        response = {**response, "body": {**response["body"], "usage": counts}}
    return {**output, "response": response, "whiflash": extra}


def by_span(rounds: Sequence[RoundRecord], spans: Sequence[Span]) -> dict[str, dict[str, Any]]:
    """Figures per span kind. A round belongs to the span in which its first token falls; `tokens`
    counts all tokens of the kind, also those of prefill and of rounds that began before it."""
    groups: dict[str, list[RoundRecord]] = {}
    tokens: dict[str, int] = {}
    for span in spans:
        groups.setdefault(span.kind, [])
        tokens[span.kind] = tokens.get(span.kind, 0) + span.end - span.start
    at = 0
    for record in sorted(rounds, key=lambda record: record.position):
        while at < len(spans) - 1 and record.position >= spans[at].end:
            at += 1
        if spans:
            groups[spans[at].kind].append(record)
    out: dict[str, dict[str, Any]] = {}
    for kind, records in groups.items():
        figures = summarise(records)
        out[kind] = {"tokens": tokens[kind]} | {name: figures[name] for name in _SPAN_FIGURES}
    return out


def _drop_stop_text(turn: Turn, stop: str) -> None:
    """Take the stop string, and what its last token holds beyond it, off the end of `turn`.

    Token ids end with the token that completed the stop string, so the parsed turn holds it too. A
    call that was complete by then is left alone: its text is gone, only its meaning is kept.
    """

    def shorten(text: str | None) -> str | None:
        if text is None:
            return None
        cut = stop if text.endswith(stop) else stop.rstrip()  # white space may be stripped already
        return text.removesuffix(cut) or None

    kind = turn.spans[-1].kind
    if kind == "content":
        turn.content = shorten(turn.content)
    elif kind == "reasoning":
        turn.reasoning_content = shorten(turn.reasoning_content)
    elif turn.invalid_tool_calls:
        last = turn.invalid_tool_calls[-1]
        turn.invalid_tool_calls[-1] = replace(last, text=shorten(last.text) or "")


def agreement(turn: Turn, recorded: dict[str, Any] | None) -> dict[str, bool | None] | None:
    """How the generated turn compares with the recorded one; None without a recorded turn.

    `tool_name`: the same tools in the same order. `arguments`: as many calls, with equal JSON
    arguments. `text`: equal content, surrounding white space aside. A comparison is None where
    neither turn has anything to compare, so that rates are not flattered by empty turns.
    """
    if recorded is None:
        return None
    theirs = Message.model_validate(recorded)
    names = [call.name for call in turn.tool_calls]
    their_names = [call.name for call in theirs.tool_calls]
    arguments = [_arguments_value(call) for call in turn.tool_calls]
    their_arguments = [_arguments_value(call) for call in theirs.tool_calls]
    text, their_text = (turn.content or "").strip(), (theirs.content or "").strip()
    has_calls = bool(names or their_names)
    return {
        "tool_name": names == their_names if has_calls else None,
        "arguments": json_equal(arguments, their_arguments) if has_calls else None,
        "text": text == their_text if text or their_text else None,
    }


def json_equal(left: Any, right: Any) -> bool:
    """Equality of JSON values: 1 equals 1.0, but not true, which Python's `==` would say."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(json_equal(left[k], right[k]) for k in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(json_equal, left, right))
    return bool(left == right)


def _arguments_value(call: ToolCall) -> Any:
    """Arguments as a JSON value where they are one; a recording may hold them as a string."""
    if not isinstance(call.arguments, str):
        return call.arguments
    try:
        return json.loads(call.arguments)
    except ValueError:
        return call.arguments


def _tool_call(custom_id: str, index: int, call: ToolCall) -> dict[str, Any]:
    arguments = call.arguments
    return {
        "id": "call_" + _hash("call", custom_id, str(index)),
        "type": "function",
        "function": {
            "name": call.name,
            "arguments": arguments if isinstance(arguments, str) else _json_text(arguments),
        },
    }


def _json_text(value: dict[str, Any]) -> str:
    """Compact JSON with non-ASCII text unescaped, but lone surrogates, which UTF-8 cannot hold."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _logprobs(logprobs: list[TokenLogprob] | None, chat: Chat) -> dict[str, Any] | None:
    if logprobs is None:
        return None

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = chat.decode([token_id])
        # A token that holds part of a character has no text of its own, so no bytes are claimed.
        known = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": known}

    return {
        "content": [
            entry(item.token_id, item.logprob)
            | {"top_logprobs": [entry(token_id, value) for token_id, value in item.top]}
            for item in logprobs
        ],
        "refusal": None,
    }


def _hash(*parts: str) -> str:
    text = "\0".join(parts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=12).hexdigest()
