"""Templates of requests and answers, filled with values; `tool_spec.py` tells the notation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from agent_values import Value, text_of

_PART = re.compile(r"\[[^\]]*\]|[^\[\]]+")
_NO_ON = re.compile(r"\bon (?=today|tomorrow|next )")
_FIELD = re.compile(r"\{([\w.]+)(?:=([^}]*))?\}")

# How an imperative ("book a table") becomes a message. Most are terse, as people write to agents.
WRAPPERS = (
    "{T}.", "{T}.", "{T}", "Please {t}.", "{T}, please.", "Can you {t}?", "Could you {t}?",
    "I need you to {t}.", "Hi! Please {t}.", "I want you to {t}.", "Could you please {t}?",
)  # fmt: skip
FRESH_WRAPPERS = (
    "Would you {t}?", "Hello, I would like you to {t}.", "{T}, thanks in advance.",
    "My next task for you: {t}.", "Be so kind and {t}.",
)  # fmt: skip


def named(template: str) -> set[str]:
    """All parameters that a template can set."""
    return {match[1] for match in _FIELD.finditer(template)}


def droppable(template: str) -> set[str]:
    """Parameters that stand alone in an optional part, so that a request can leave them out."""
    fields = [_names(part) for part in _PART.findall(template) if part.startswith("[")]
    return {names[0] for names in fields if len(names) == 1} - {
        name for part in _PART.findall(template) if part[0] != "[" for name in _names(part)
    }


def fill(
    template: str,
    draw: Callable[[str], Value],
    required: Callable[[str], bool],
    rng: Random,
    drop: str | None = None,
) -> tuple[str, dict[str, Value]]:
    """A template with values: (text, values by parameter).

    `draw` makes a value of a parameter, `required` says whether an optional part that holds it has
    to stay. The part that holds `drop` is left out.
    """
    values: dict[str, Value] = {}
    text = ""
    for part in _PART.findall(template):
        optional, body = part.startswith("["), part.strip("[]")
        names = _names(body)
        if optional:
            if drop in names or any(name in values for name in names):
                continue
            if not all(required(name) for name in names) and rng.random() < 0.5:
                continue

        def written(match: re.Match[str]) -> str:
            name, fixed = match[1], match[2]
            if fixed is not None:
                values[name] = Value(_constant(fixed), "")
            elif name not in values:
                values[name] = draw(name)
            return values[name].text

        text += _FIELD.sub(written, body)
    return _NO_ON.sub("", text).strip(), values


def fill_answer(template: str, arguments: Mapping[str, Value], facts: Mapping[str, Any]) -> str:
    """A template of an answer with the texts of arguments and result fields."""
    texts = {name: text_of(value.json) for name, value in arguments.items()}
    texts |= {name: text_of(value) for name, value in facts.items()}
    return _FIELD.sub(lambda match: texts[match[1]], template)


def is_imperative(template: str) -> bool:
    """Whether a request may be wrapped ("please ...", "can you ... ?")."""
    return template[0].islower()


def wrap(text: str, rng: Random, fresh: bool = False) -> str:
    """An imperative as a message; `fresh` takes the wrappers that are kept for evaluation."""
    wrapper = rng.choice(FRESH_WRAPPERS if fresh else WRAPPERS)
    return wrapper.format(t=text, T=text[0].upper() + text[1:])


def _names(body: str) -> list[str]:
    return [match[1] for match in _FIELD.finditer(body)]


def _constant(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
