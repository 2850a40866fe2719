"""Conversations, one function for each kind: which tools, who says what, what is called.

A kind chooses its tools, offers them among others, and writes the messages of the conversation into
the `Conversation`. `make_traces.py` decides how many of each kind there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_values import Value, text_of
from chains import Chain
from conversation import Conversation
from phrasing import droppable, fill, fill_answer, is_imperative, wrap
from reasoning import refusal
from small_talk import FACTS, TALK
from tool_spec import Tool

_PASSING = (
    "timeout after 30 seconds", "service unavailable", "connection reset", "rate limit reached",
    "temporary network error", "503 server busy",
)  # fmt: skip
_LASTING = ("permission denied", "account is locked", "function is disabled", "invalid API key")
_REPLIES = ("{0}", "{0}.", "{0}, please.", "Sorry, {0}.", "Make it {0}.", "It is {0}.")
_FOLLOW_UPS = ("And {0}?", "What about {0}?", "Now the same for {0}.", "And for {0}?")
_CORRECTIONS = ("Actually, make that {0}.", "Oh no, {0} is what I meant.", "Change that to {0}.")
_TEXTS = {"message", "text", "subject", "title"}
_TIMES = {"date", "time", "start", "end", "since", "value"}
_JOINS = (" Also, {0}.", " Then {0}.", " And please {0}.")


def request_for(tool: Tool, c: Conversation, drop: str | None = None) -> tuple[str, dict, bool]:
    """(text, values, whether it is an imperative) of a request for `tool`, not wrapped yet."""
    templates = _requests(tool, c)
    if drop is not None:
        templates = [template for template in templates if drop in droppable(template)]
    template = c.rng.choice(templates)
    text, values = fill(
        template,
        lambda name: tool.param(name).values.draw(c.rng),
        lambda name: tool.param(name).required,
        c.rng,
        drop,
    )
    return text, values, is_imperative(template)


def _ask(tool: Tool, c: Conversation) -> tuple[str, dict[str, Value]]:
    """A whole request; the user says it."""
    text, values, imperative = request_for(tool, c)
    text = wrap(text, c.rng, c.fresh) if imperative else text
    c.user(text)
    return text, values


def _task(tool: Tool, c: Conversation) -> dict[str, Value]:
    """Request, call, result, answer."""
    text, values = _ask(tool, c)
    c.call(c.reason_call(text, tool, values), [(tool, values)])
    _finish(c, [(tool, values)])
    return values


def _finish(c: Conversation, done: Sequence[tuple[Tool, dict[str, Value]]]) -> None:
    """The results of the last calls, and the answer that states them."""
    results, sentences = [], []
    for tool, values in done:
        result, facts = tool.run(values, c.rng)
        c.result(result)
        results.append((c.name(tool), result))
        sentences.append(fill_answer(c.rng.choice(tool.answers), values, facts))
    c.answer(c.reasoning.answer(results), " ".join(sentences))


def single(c: Conversation) -> None:
    """One call and its answer; sometimes the recording ends with the call."""
    tool = c.pick()
    c.offer([tool])
    if c.rng.random() < 0.25:
        text, values = _ask(tool, c)
        c.call(c.reason_call(text, tool, values), [(tool, values)])
    else:
        _task(tool, c)


def two_tasks(c: Conversation) -> None:
    """Two requests after each other, the second perhaps small talk."""
    first, second = c.pick(2)
    c.offer([first, second])
    _task(first, c)
    if c.rng.random() < 0.25:
        _small_talk(c, after_task=True)
    else:
        _task(second, c)


def parallel(c: Conversation) -> None:
    """The same tool twice in one turn."""
    tool = c.pick(among=lambda tool: bool(tool.pairs))
    c.offer([tool])

    def draw(name: str) -> Value:
        bare = name.split(".")[-1]
        value = tool.param(bare).values.draw(c.rng)
        while value.json in drawn.get(bare, []):
            value = tool.param(bare).values.draw(c.rng)
        drawn.setdefault(bare, []).append(value.json)
        return value

    drawn: dict[str, list[Any]] = {}
    text, values = fill(c.rng.choice(tool.pairs), draw, lambda name: True, c.rng)
    shared = {name: value for name, value in values.items() if "." not in name}
    sets = [
        shared | {name[2:]: value for name, value in values.items() if name.startswith(side)}
        for side in ("1.", "2.")
    ]
    c.user(text)
    calls = [(tool, arguments) for arguments in sets]
    c.call(c.reason_calls(text, calls), calls)
    _finish(c, calls)


def mixed(c: Conversation) -> None:
    """Two or three different tools in one turn."""
    tools = c.pick(3 if c.rng.random() < 0.2 else 2)
    c.offer(tools)
    text = ""
    calls = []
    for tool in tools:
        part, values, imperative = request_for(tool, c)
        calls.append((tool, values))
        if not text:
            text = wrap(part, c.rng, c.fresh) if imperative else part
            if imperative and text[-1].isalnum():
                text += "."
        elif imperative:
            text += c.rng.choice(_JOINS).format(part)
        else:
            text += f" {part}"
    c.user(text)
    c.call(c.reason_calls(text, calls), calls)
    _finish(c, calls)


def chain(c: Conversation, chains: Sequence[Chain], tools: dict[str, Tool]) -> None:
    """Two calls, the second with a field of the first result."""
    link = c.rng.choice(chains)
    first, second = tools[link.first], tools[link.second]
    c.offer([first, second])

    def param(name: str) -> Any:
        return (first if name[0] == "1" else second).param(name[2:])

    template = c.rng.choice(link.requests)
    text, values = fill(
        template,
        lambda name: param(name).values.draw(c.rng),
        lambda name: param(name).required,
        c.rng,
    )
    text = wrap(text, c.rng, c.fresh) if is_imperative(template) else text
    c.user(text)
    one = {name[2:]: value for name, value in values.items() if name[0] == "1"}
    c.call(c.reason_first(text, first, one, second), [(first, one)])
    result, facts = first.run(one, c.rng)
    c.result(result)
    two = {name[2:]: value for name, value in values.items() if name[0] == "2"}
    two |= {name: one[source] for name, source in link.same.items()}
    for name, source in link.links.items():
        two[name] = Value(facts[source], text_of(facts[source]))
    shown = c.arguments(second, two)
    c.call(c.reasoning.then(c.name(first), result, c.name(second), shown), [(second, two)])
    _finish(c, [(second, two)])


def retry(c: Conversation) -> None:
    """An error that passes: the same call again, which works or fails once more."""
    tool = c.pick()
    c.offer([tool])
    text, values = _ask(tool, c)
    c.call(c.reason_call(text, tool, values), [(tool, values)])
    error = c.rng.choice(_PASSING)
    c.result({"error": error})
    c.call(c.reasoning.retry(c.name(tool), error), [(tool, values)])
    if c.rng.random() < 0.75:
        _finish(c, [(tool, values)])
        return
    c.result({"error": error})
    c.answer(
        c.reasoning.give_up(c.name(tool), error),
        f"{c.name(tool)} failed twice: {error}. Please try again later.",
    )


def explain(c: Conversation) -> None:
    """An error that stays: the assistant says so."""
    tool = c.pick()
    c.offer([tool])
    text, values = _ask(tool, c)
    c.call(c.reason_call(text, tool, values), [(tool, values)])
    error = c.rng.choice(_LASTING)
    c.result({"error": error})
    c.answer(c.reasoning.give_up(c.name(tool), error), f"This did not work: {error}.")


def mend(c: Conversation) -> None:
    """A value that is not known: the assistant says so, the user gives another one."""
    tool = c.pick(among=lambda tool: bool(_looked_up(tool)))
    c.offer([tool])
    text, values = _ask(tool, c)
    c.call(c.reason_call(text, tool, values), [(tool, values)])
    name = c.rng.choice(_looked_up(tool))
    label = tool.param(name).label
    error = f"{label} not found: {values[name].json}"
    c.result({"error": error})
    c.answer(
        c.reasoning.give_up(c.name(tool), error),
        f"This did not work: {error}. Which {label} do you mean?",
    )
    _other_value(c, tool, values, name, _REPLIES)


def follow_up(c: Conversation) -> None:
    """The same once more for another value."""
    tool = c.pick(among=lambda tool: bool(_free_text(tool)) and len(tool.required) <= 2)
    c.offer([tool])
    values = _task(tool, c)
    name = _free_text(tool)[0]
    text = c.rng.choice(_FOLLOW_UPS)
    other = _different(c, tool, values, name)
    text = text.format(other.text)
    c.user(text)
    values = values | {name: other}
    c.call(
        c.reasoning.again(text, c.name(tool), c.arguments(tool, values)),
        [(tool, values)],
    )
    _finish(c, [(tool, values)])


def correction(c: Conversation) -> None:
    """The user takes a value back after the answer. Kept for evaluation."""
    tool = c.pick(among=lambda tool: bool(_free_text(tool)))
    c.offer([tool])
    values = _task(tool, c)
    _other_value(c, tool, values, c.rng.choice(_free_text(tool)), _CORRECTIONS)


def clarify(c: Conversation) -> None:
    """A required value is missing: the assistant asks, the user tells it."""
    tool = c.pick(among=lambda tool: bool(_can_be_missing(tool, c)))
    c.offer([tool])
    name = c.rng.choice(_can_be_missing(tool, c))
    text, values, imperative = request_for(tool, c, drop=name)
    text = wrap(text, c.rng, c.fresh) if imperative else text
    c.user(text)
    param = tool.param(name)
    shown = c.offered(tool).names[name]
    c.answer(
        c.reasoning.ask(text, c.name(tool), tool.does, shown),
        c.rng.choice(("Which {0} should I use?", "Please tell me the {0}.")).format(param.label),
    )
    value = param.values.draw(c.rng)
    c.user(c.rng.choice(_REPLIES).format(value.text))
    values[name] = value
    c.call(
        c.reasoning.given(shown, value.json, c.name(tool), c.arguments(tool, values)),
        [(tool, values)],
    )
    if c.rng.random() < 0.5:
        _finish(c, [(tool, values)])


def no_tool(c: Conversation) -> None:
    """A request that none of the offered tools fits."""
    tool = c.pick()
    c.offer([], without=tool.domain)
    text, _ = _ask(tool, c)
    names = c.offered_names
    c.answer(c.reasoning.fits_none(text, names), refusal(names))


def chat(c: Conversation) -> None:
    """Small talk with tools at hand, or facts and small talk without."""
    if c.rng.random() < 0.6:
        c.offer([])
        _small_talk(c)
        return
    if c.rng.random() < 0.5:
        _small_talk(c)
    question, fact = c.rng.choice(FACTS)
    c.user(question)
    c.answer(c.reasoning.chat(question), fact)


def _small_talk(c: Conversation, after_task: bool = False) -> None:
    said, replies = c.rng.choice(TALK[1:3] + TALK[5:] if after_task else TALK)
    text = c.rng.choice(said)
    c.user(text)
    c.answer(c.reasoning.chat(text), c.rng.choice(replies))


def _other_value(
    c: Conversation, tool: Tool, values: dict[str, Value], name: str, wordings: Sequence[str]
) -> None:
    """The user gives another value for `name`; the call is made with it and answered."""
    other = _different(c, tool, values, name)
    c.user(c.rng.choice(wordings).format(other.text))
    values = values | {name: other}
    shown = c.offered(tool).names[name]
    c.call(
        c.reasoning.given(shown, other.json, c.name(tool), c.arguments(tool, values)),
        [(tool, values)],
    )
    _finish(c, [(tool, values)])


def _different(c: Conversation, tool: Tool, values: dict[str, Value], name: str) -> Value:
    value = tool.param(name).values.draw(c.rng)
    while value.json == values[name].json:
        value = tool.param(name).values.draw(c.rng)
    return value


def _requests(tool: Tool, c: Conversation) -> Sequence[str]:
    return tool.fresh if c.fresh else tool.requests


def _free_text(tool: Tool) -> list[str]:
    """Required short strings that the schema does not list: what a user may exchange in a word."""
    return [
        name
        for name in tool.required
        if tool.param(name).values.schema["type"] == "string"
        and "enum" not in tool.param(name).values.schema
        and name not in _TEXTS
    ]


def _looked_up(tool: Tool) -> list[str]:
    """Required strings that a tool may not find."""
    return [name for name in _free_text(tool) if name not in _TIMES]


def _can_be_missing(tool: Tool, c: Conversation) -> list[str]:
    """Required parameters that some request can leave out."""
    leaves_out = set().union(*(droppable(request) for request in _requests(tool, c)))
    return [name for name in tool.required if name in leaves_out]
