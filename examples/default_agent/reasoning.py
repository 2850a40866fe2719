"""The reasoning of the agent, written as short regular text.

Every sentence is built from words that stand in the prompt (request, tool, arguments, result), in a
few fixed forms. A model of 135 million parameters learns such text, and text that follows from its
context is what drafters predict well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

_QUOTED_WORDS = 14  # of the request; longer ones are cut after
_KEPT_WORDS = 10
_QUOTED_CHARS = 90  # for requests without spaces
_PURPOSE_WORDS = 8
_VALUE_CHARS = 48
_SHOWN_FIELDS = 3
_SHOWN_TOOLS = 4
_NOT_LAST = {
    *("a", "an", "and", "as", "at", "by", "for", "from", "given", "in", "its", "of", "on", "or"),
    *("that", "the", "to", "with"),
}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def quote(request: str) -> str:
    """The request in quotation marks; long ones are cut after their first words."""
    words = request.split()
    text = " ".join(words if len(words) <= _QUOTED_WORDS else words[:_KEPT_WORDS])
    cut = len(words) > _QUOTED_WORDS or len(text) > _QUOTED_CHARS
    text = text[:_QUOTED_CHARS].replace('"', "'")
    return f'"{text} ..."' if cut else f'"{text}"'


def purpose(description: str) -> str:
    """The first words of a tool's description, to go on after a colon."""
    sentence = description.split("Tool description: ")[-1].strip().split(". ")[0].rstrip(".")
    words = sentence.split()
    if len(words) > _PURPOSE_WORDS:
        words = words[:_PURPOSE_WORDS]
        while words[1:] and words[-1].lower() in _NOT_LAST:
            words.pop()
    text = " ".join(words).rstrip(",;:")
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def shown(value: Any) -> str:
    """A value as the call writes it, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _VALUE_CHARS else text[: _VALUE_CHARS - 4].rstrip() + " ..."


def pairs(values: Mapping[str, Any]) -> str:
    """`city = "Oslo", days = 3`"""
    return ", ".join(f"{name} = {shown(value)}" for name, value in values.items())


def listed(names: Sequence[str]) -> str:
    """`a, b and c`; of long lists the first few."""
    if len(names) > _SHOWN_TOOLS:
        return f"{', '.join(names[:_SHOWN_TOOLS])} and others"
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


class Reasoning:
    """Writes the reasoning of one conversation; the generator chooses among equal wordings."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def _asks(self, request: str) -> str:
        forms = ("The user asks: {0}.", "The request is {0}.", "I am asked: {0}.")
        return self._rng.choice(forms).format(quote(request))

    def _picks(self, name: str, description: str) -> str:
        forms = ("{0} fits: {1}.", "{0} does this: {1}.", "I use {0}: {1}.")
        return self._rng.choice(forms).format(name, purpose(description))

    def _arguments(self, arguments: Mapping[str, Any]) -> str:
        if not arguments:
            return "It takes no arguments."
        forms = ("Arguments: {0}.", "I call it with {0}.")
        return self._rng.choice(forms).format(pairs(arguments))

    def call(
        self,
        request: str,
        name: str,
        description: str,
        arguments: Mapping[str, Any],
        unused: Sequence[str] = (),
    ) -> str:
        """One call. `unused` are the optional parameters that the request does not mention."""
        parts = [self._asks(request), self._picks(name, description), self._arguments(arguments)]
        if unused:
            parts.append(f"Not given: {listed(list(unused[:2]))}.")
        return " ".join(parts)

    def calls(self, request: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Several calls in one turn."""
        count = _NUMBERS[len(calls)] if len(calls) < len(_NUMBERS) else str(len(calls))
        steps = "; ".join(f"{name} with {pairs(arguments)}" for name, arguments in calls)
        forms = ("This needs {0} calls: {1}.", "I make {0} calls: {1}.")
        return f"{self._asks(request)} {self._rng.choice(forms).format(count, steps)}"

    def first(
        self,
        request: str,
        name: str,
        description: str,
        arguments: Mapping[str, Any],
        then: str,
    ) -> str:
        """The first of two calls, the second of which needs its result."""
        return (
            f"{self._asks(request)} First {name}: {purpose(description)}. "
            f"{self._arguments(arguments)} Then {then}."
        )

    def then(self, done: str, result: Any, name: str, arguments: Mapping[str, Any]) -> str:
        """The next call, after the result of `done`."""
        return f"{self.returned(done, result)} Next is {name}. {self._arguments(arguments)}"

    def returned(self, name: str, result: Any) -> str:
        """What a result says: its first fields, of a list those of the first element."""
        for key, value in result.items():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                fields = dict(list(value[0].items())[:_SHOWN_FIELDS])
                return f"{name} returned {len(value)} {key}, the first with {pairs(fields)}."
        return f"{name} returned {pairs(dict(list(result.items())[:_SHOWN_FIELDS]))}."

    def answer(self, results: Sequence[tuple[str, Any]]) -> str:
        """The answer after one or more results."""
        told = " ".join(self.returned(name, result) for name, result in results)
        return f"{told} {self._rng.choice(('I tell the user.', 'This answers the request.'))}"

    def ask(self, request: str, name: str, description: str, missing: str) -> str:
        """A question for a required argument that the request does not give."""
        forms = ("It needs {0}, which is not given. I ask.", "But {0} is missing, so I ask.")
        choice = self._rng.choice(forms).format(missing)
        return f"{self._asks(request)} {self._picks(name, description)} {choice}"

    def given(self, missing: str, value: Any, name: str, arguments: Mapping[str, Any]) -> str:
        """The call after the user gave what was missing, or corrected it."""
        return f"Now {missing} = {shown(value)}. I can call {name}. {self._arguments(arguments)}"

    def again(self, request: str, name: str, arguments: Mapping[str, Any]) -> str:
        """The tool of the turn before with other arguments."""
        return f"{self._asks(request)} That is {name} again. {self._arguments(arguments)}"

    def retry(self, name: str, error: str) -> str:
        """A second try after an error that may pass."""
        return f'{name} failed: "{error}". This may pass, so I try the same call again.'

    def give_up(self, name: str, error: str) -> str:
        """The explanation after an error that will not pass."""
        return f'{name} failed: "{error}". Trying again would not help. I tell the user.'

    def fits_none(self, request: str, names: Sequence[str]) -> str:
        """No tool that is offered fits the request."""
        forms = ("None of them does this, so I call nothing.", "None fits, so I make no call.")
        return f"{self._asks(request)} I have {listed(names)}. {self._rng.choice(forms)}"

    def chat(self, request: str) -> str:
        """A turn that asks for nothing that tools could do."""
        return f"{self._asks(request)} No function is needed. I answer."


def refusal(names: Sequence[str]) -> str:
    """The answer where no tool fits."""
    return f"I cannot do this: none of my functions fits. I have {listed(names)}."
