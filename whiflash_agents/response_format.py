"""Where the regions of a generated turn are: reasoning, tool calls, plain content.

A response template (transformers' `tokenizer.response_template`) says how a model marks them.
transformers' own parser reads a region's value well, but one malformed call makes it refuse the
whole message, and a closing tag inside a JSON string ends the call. So regions are found here, each
with its place in the text, and `chat.py` hands them to that parser one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import regex  # type: ignore[import-untyped]

Kind = Literal["reasoning", "tool_call", "content"]

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
# A marker that the output's end cut in two is taken for one from this length on: "<thi", "</to".
_CUT_MARKER = 4
_JSON = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of the text, markers included: `text[start:end]`; its inside is
    `text[body_start:body_end]`. `closed` is False when the text ended (or broke) before its
    closing marker."""

    kind: Kind
    start: int
    end: int
    body_start: int
    body_end: int
    closed: bool
    marked: bool  # opened by a marker; False for the text between marked regions
    is_json: bool = False  # a tool call whose body is one JSON value


@dataclass(frozen=True, slots=True)
class _Field:
    kind: Kind
    open: Any  # compiled regex, None for the field that takes what the others leave
    close: Any  # compiled regex or None
    is_json: bool


class ResponseFormat:
    """A response template, ready to find and read regions.

    Raises:
        ValueError: transformers does not accept the template.
    """

    def __init__(self, template: dict[str, Any], tokenizer: Any) -> None:
        tokenizer.get_response_parser(template, prefix="")  # transformers' own check
        self._template = template
        self._tokenizer = tokenizer
        self._anchor = _pattern(template, "start_anchor", "start_anchor_pattern")
        self._fields = [_field(name, spec) for name, spec in template["fields"].items()]
        implicit = [field for field in self._fields if field.open is None]
        self._rest = implicit[0] if implicit else _Field("content", None, None, False)

    def turn_beginning(self, prompt: str) -> str | None:
        """What the prompt already wrote of the assistant's turn (such as `<think>`); None if the
        prompt's text holds no beginning of one."""
        found = None
        for found in self._anchor.finditer(prompt):  # noqa: B007 - the last one counts
            pass
        return None if found is None else prompt[found.end() :]

    def regions(self, text: str, *, end_marker: str | None) -> list[Region]:
        """The regions of `text`, in order, without gaps. `end_marker` is the end-of-turn token
        that followed; None if the text was cut off, and may stop inside a region or a marker."""
        found: list[Region] = []
        position = 0
        while position < len(text):
            field, opening = self._next_opening(text, position)
            before = len(text) if opening is None else opening.start()
            for plain in self._plain(text, position, before):
                found.append(plain)
            if field is None or opening is None:
                break
            region = self._marked(text, field, opening, end_marker)
            found.append(region)
            position = region.end
        if end_marker is None and found and not found[-1].marked:
            found[-1:] = self._split_cut_marker(text, found[-1])
        return found

    def read_calls(self, text: str, region: Region, tools: Sequence[dict[str, Any]]) -> list[Any]:
        """What transformers' parser makes of one tool-call region, alone: usually one call.

        Raises:
            ValueError, KeyError or another error of that parser: the region is malformed.
        """
        inside = text[region.body_start : region.body_end]
        if region.is_json:
            # A tag inside a JSON string would end the region there; its escaped form means the
            # same. Outside of strings JSON has neither character.
            inside = inside.replace("<", "\\u003c").replace("|", "\\u007c")
            tools = ()  # JSON says the types itself
        opening, closing = text[region.start : region.body_start], ""
        if region.closed:
            closing = text[region.body_end : region.end]
        elif not region.is_json:
            raise ValueError("its closing marker is missing")
        message = self._tokenizer.parse_response(
            opening + inside + closing, self._template, prefix="", tools=list(tools) or None
        )
        calls = message.get("tool_calls") or []
        return calls if isinstance(calls, list) else [calls]

    def _next_opening(self, text: str, position: int) -> tuple[_Field | None, Any]:
        best_field, best = None, None
        for field in self._fields:
            match = None if field.open is None else field.open.search(text, position)
            if match is None or match.end() == match.start():
                continue
            if best is None or (match.start(), -match.end()) < (best.start(), -best.end()):
                best_field, best = field, match
        return best_field, best

    def _plain(self, text: str, start: int, end: int) -> Iterator[Region]:
        """Text outside markers; a closing marker of the plain field is in no body."""
        while start < end:
            closing = None
            if self._rest.close is not None:
                closing = self._rest.close.search(text, start, end)
            if closing is None or closing.end() == closing.start():
                yield Region(self._rest.kind, start, end, start, end, False, False)
                return
            yield Region(self._rest.kind, start, closing.end(), start, closing.start(), True, False)
            start = closing.end()

    def _marked(self, text: str, field: _Field, opening: Any, end_marker: str | None) -> Region:
        ended = end_marker is not None
        body = opening.end()
        search_from = body
        if field.is_json:
            end = _json_end(text, body)
            if end.complete:
                closing = self._closing(field, text, end.position)
                following = field.open.search(text, end.position)
                if closing is not None and not text[end.position : closing.start()].strip():
                    return _region(field, opening, closing)
                if closing is None or (following and following.start() < closing.start()):
                    # The closing marker was forgotten (what follows is not part of the call), or
                    # the end of the text cut it in two.
                    cut_in_two = not ended and _only_a_cut_marker(field, text, end.position)
                    stop = len(text) if cut_in_two else end.position
                    return _open_region(field, opening, stop, end.position)
            elif end.ran_out and not ended:
                return self._cut_off(text, field, opening)
            search_from = end.position
        closing = self._closing(field, text, search_from)
        if field.is_json:
            following = field.open.search(text, search_from)
            limit = len(text) if following is None else following.start()
            if following and (closing is None or limit < closing.start()):
                return _open_region(field, opening, limit, limit)
            # Broken JSON may hold the closing tag in a string: the last one before the next call
            # leaves no tag behind in the content.
            if closing is not None:
                *_, closing = field.close.finditer(text, search_from, limit)
        if closing is not None:
            return _region(field, opening, closing)
        if end_marker is not None:
            closed = field.close is None or field.close.search(end_marker) is not None
            return _open_region(field, opening, len(text), len(text), closed=closed)
        return self._cut_off(text, field, opening)

    @staticmethod
    def _closing(field: _Field, text: str, position: int) -> Any:
        return None if field.close is None else field.close.search(text, position)

    @staticmethod
    def _cut_off(text: str, field: _Field, opening: Any) -> Region:
        """A region that runs to the end of the text; half a closing marker is not in its body."""
        body, end = opening.end(), len(text)
        if field.close is not None:
            tail = field.close.search(text, body, partial=True)
            if tail is not None and tail.partial and end - tail.start() >= _CUT_MARKER:
                end = tail.start()
        return _open_region(field, opening, len(text), end)

    def _split_cut_marker(self, text: str, plain: Region) -> list[Region]:
        """`plain`, or `plain` and the region whose opening marker the end of the text cut."""
        for field in self._fields:
            if field.open is None:
                continue
            tail = field.open.search(text, plain.start, partial=True)
            if tail is None or not tail.partial or len(text) - tail.start() < _CUT_MARKER:
                continue
            cut, end = tail.start(), len(text)
            opened = Region(field.kind, cut, end, end, end, False, True, field.is_json)
            kept = Region(plain.kind, plain.start, cut, plain.start, cut, False, False)
            return [opened] if cut == plain.start else [kept, opened]
        return [plain]


def _region(field: _Field, opening: Any, closing: Any) -> Region:
    inside = (opening.end(), closing.start())
    return Region(field.kind, opening.start(), closing.end(), *inside, True, True, field.is_json)


def _open_region(
    field: _Field, opening: Any, end: int, body_end: int, *, closed: bool = False
) -> Region:
    """A region without its closing marker; `closed` if the end-of-turn token is one."""
    inside = (opening.end(), body_end)
    return Region(field.kind, opening.start(), end, *inside, closed, True, field.is_json)


def _only_a_cut_marker(field: _Field, text: str, position: int) -> bool:
    """Whether white space and the beginning of a closing marker are all that is left."""
    if field.close is None:
        return False
    tail = field.close.search(text, position, partial=True)
    return tail is not None and tail.partial and not text[position : tail.start()].strip()


@dataclass(frozen=True, slots=True)
class _JsonEnd:
    """How far a JSON value reaches: `complete` at `position`, or broken there, or `ran_out`."""

    complete: bool
    position: int
    ran_out: bool = False


def _json_end(text: str, start: int) -> _JsonEnd:
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        _, end = _JSON.raw_decode(text, start)
    except json.JSONDecodeError as error:
        # A tag before the place of the error stands inside a sound string: no need to look there.
        unterminated = error.msg.startswith("Unterminated string")
        at_end = error.pos >= len(text.rstrip())
        return _JsonEnd(False, max(start, error.pos), unterminated or at_end)
    except (RecursionError, ValueError):  # nested too deeply, or a number of thousands of digits
        return _JsonEnd(False, start)
    return _JsonEnd(True, end)


def _field(name: str, spec: dict[str, Any]) -> _Field:
    kind: Kind = "content"
    if name in _REASONING_FIELDS:
        kind = "reasoning"
    elif name == "tool_calls":
        kind = "tool_call"
    return _Field(
        kind,
        _pattern(spec, "open", "open_pattern"),
        _pattern(spec, "close", "close_pattern"),
        spec.get("content") == "json" and kind == "tool_call",
    )


def _pattern(spec: dict[str, Any], literal_key: str, pattern_key: str) -> Any:
    literals = spec.get(literal_key)
    if literals is not None:
        options = [literals] if isinstance(literals, str) else list(literals)
        longest_first = sorted(options, key=len, reverse=True)
        return regex.compile("|".join(regex.escape(option) for option in longest_first))
    if pattern_key in spec:
        return regex.compile(spec[pattern_key], regex.DOTALL)
    return None
