"""A generated assistant turn: content, reasoning, tool calls, and which tokens are which.

`read_turn` fills it from the regions of a text. A malformed call is reported beside what parsed and
takes nothing else with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import regex  # type: ignore[import-untyped]

from .response_format import Kind, Region, ResponseFormat
from .token_text import TokenText
from .traces.schema import ToolCall


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `token_ids[start:end]` of one kind. The markers that delimit a region belong to it,
    the end-of-turn token to the last span."""

    kind: Kind
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """A call that cannot be used. `name` and `arguments` (JSON text) are what could be made out of
    it, `text` is what the model wrote between the markers, `error` says what is wrong."""

    name: str | None
    arguments: str | None
    text: str
    error: str


@dataclass(slots=True)
class Turn:
    """A generated assistant turn. `spans` are contiguous and cover all its tokens. Tool calls have
    no id: the model does not write any."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    invalid_tool_calls: list[InvalidToolCall] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @property
    def reasoning_tokens(self) -> int:
        return sum(span.end - span.start for span in self.spans if span.kind == "reasoning")


def read_turn(
    written: TokenText,
    beginning: str,
    length: int | None,
    response_format: ResponseFormat,
    tools: Sequence[dict[str, Any]],
) -> Turn:
    """The message in the text of the generated tokens.

    Args:
        written: the text of all generated tokens.
        beginning: what the prompt already holds of this turn.
        length: the index of the end-of-turn token; None if there is none (cut off).
        response_format: how the model marks regions.
        tools: types the arguments of formats that write them as bare text.
    """
    text, end_marker = written.text, None
    if length is not None:
        starts = [*written.starts, len(text)]
        text, end_marker = text[: starts[length]], text[starts[length] : starts[length + 1]]
    whole, offset = beginning + text, len(beginning)
    regions = [
        region
        for region in response_format.regions(whole, end_marker=end_marker)
        if region.end > offset
    ]
    turn = Turn()
    content: list[tuple[int, str]] = []  # with the index of the region
    reasoning: list[str] = []
    for index, region in enumerate(regions):
        body = whole[region.body_start : region.body_end]
        if region.kind == "tool_call":
            _read_calls(turn, whole, region, response_format, tools)
        elif region.kind == "reasoning":
            reasoning.append(body.strip())
        else:
            content.append((index, whole[max(offset, region.body_start) : region.body_end]))
    turn.content = _join_content(content, regions, bool(whole[:offset].strip()))
    turn.reasoning_content = "\n".join(piece for piece in reasoning if piece) or None
    turn.spans = list(_spans(regions, whole, offset, written))
    return turn


def _read_calls(
    turn: Turn,
    text: str,
    region: Region,
    response_format: ResponseFormat,
    tools: Sequence[dict[str, Any]],
) -> None:
    try:
        calls = [_tool_call(value) for value in response_format.read_calls(text, region, tools)]
        if not calls:
            raise ValueError("it is empty")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        body = text[region.body_start : region.body_end].strip()
        name, arguments = _guess_call(body)
        reason = _reason(error, cut_off=not region.closed)
        turn.invalid_tool_calls.append(InvalidToolCall(name, arguments, body, reason))
    else:
        turn.tool_calls += calls


def _join_content(
    pieces: list[tuple[int, str]], regions: list[Region], marker_before: bool
) -> str | None:
    """The text outside of reasoning and calls. White space is kept, except beside markers at
    either end and where nothing else stands between two markers."""
    marked = [index for index, region in enumerate(regions) if region.marked]
    if marked:
        pieces = [(index, text) for index, text in pieces if text.strip()]
    text = "".join(text for _, text in pieces)
    if pieces and (marker_before or any(index < pieces[0][0] for index in marked)):
        text = text.lstrip()
    if pieces and any(index > pieces[-1][0] for index in marked):
        text = text.rstrip()
    return text or None


def _spans(regions: list[Region], whole: str, offset: int, written: TokenText) -> Iterator[Span]:
    """Token ranges of the regions. A token with a character of a marker belongs to the marker's
    region (to the first, where it touches two); white space between regions to the one before."""
    shown = [
        region for region in regions if region.marked or whole[region.start : region.end].strip()
    ]
    begin, tokens = 0, len(written.starts)
    for index, region in enumerate(shown):
        stop = tokens
        if index + 1 < len(shown):
            following = shown[index + 1]
            own_end = written.token_after(region.end - offset - 1)
            stop = written.token_at(following.start - offset) if following.marked else own_end
            stop = max(stop, own_end, begin) if region.marked else max(stop, begin)
        if stop > begin:
            yield Span(region.kind, begin, stop)
        begin = stop
    if begin < tokens:
        yield Span("content", begin, tokens)


def _tool_call(value: Any) -> ToolCall:
    """A parsed call, checked: a name, and arguments that are a JSON object."""
    function = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(function, dict):
        raise ValueError(f"expected an object with name and arguments, got {_brief(function)}")
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"the name must be a non-empty string, got {_brief(name)}")
    arguments = function.get("arguments", function.get("parameters"))
    if arguments is None:
        arguments = {}  # a function without parameters
    if isinstance(arguments, str):  # a JSON text inside a JSON string
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments must be a JSON object, got {_brief(arguments)}")
    json.dumps(arguments, allow_nan=False)  # refuses NaN and Infinity, which JSON has not
    orjson.dumps([name, arguments])  # refuses lone surrogates and integers beyond 64 bits
    return ToolCall(name=name, arguments=arguments)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _guess_call(body: str) -> tuple[str | None, str | None]:
    """Name and arguments of a call that cannot be parsed, as far as they can be made out."""
    name = regex.search(r'"name"\s*:\s*"([^"\\]+)"', body)
    arguments = regex.search(r'"(?:arguments|parameters)"\s*:\s*(.*)', body, regex.DOTALL)
    return (
        None if name is None else name[1],
        None if arguments is None else arguments[1].strip() or None,
    )


def _reason(error: Exception, *, cut_off: bool) -> str:
    if isinstance(error, RecursionError):
        return "the call is not valid: nested too deeply"
    cause = error.__cause__ if isinstance(error.__cause__, json.JSONDecodeError) else error
    said = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
    if cut_off:
        return f"the call is cut off, and not valid so far: {said}"
    return f"the call is not valid: {said}"
