"""One conversation while it is written: the tools that are offered, and the messages so far."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from agent_values import Value
from reasoning import Reasoning
from small_talk import SYSTEM_PROMPTS
from tool_spec import Offered, Tool, offer

_COUNTS = (1, 2, 3, 4, 5, 6)
_COUNT_WEIGHTS = (18, 27, 26, 17, 8, 4)


class Conversation:
    """Collects messages in OpenAI form.

    `pool` are the tools that may be asked for, `others` those that may stand beside them. With
    `fresh`, requests use the wordings that are kept for evaluation.
    """

    def __init__(
        self, rng: Random, pool: Sequence[Tool], others: Sequence[Tool], fresh: bool = False
    ) -> None:
        self.rng = rng
        self.fresh = fresh
        self.reasoning = Reasoning(rng)
        self.messages: list[dict[str, Any]] = []
        self._pool = pool
        self._others = others
        self._offered: dict[str, Offered] = {}
        self._waiting: list[str] = []  # ids of calls without a result
        self._calls = 0
        if rng.random() < 0.35:
            self.messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})

    def pick(self, count: int = 1, among: Callable[[Tool], bool] = lambda tool: True) -> Any:
        """One tool of the pool, or a list of `count` different ones."""
        found = self.rng.sample([tool for tool in self._pool if among(tool)], count)
        return found[0] if count == 1 else found

    def offer(self, tools: Sequence[Tool], without: str | None = None) -> None:
        """Offer `tools` and others (none of the domain `without`), in any order, one to six."""
        count = max(self.rng.choices(_COUNTS, _COUNT_WEIGHTS)[0], len(tools))
        chosen = list(tools)
        domains = {tool.domain for tool in tools}
        while len(chosen) < count:
            near = self.rng.random() < 0.35
            candidates = [
                tool
                for tool in self._others
                if tool not in chosen
                and tool.domain != without
                and (not near or not domains or tool.domain in domains)
            ]
            if candidates:
                chosen.append(self.rng.choice(candidates))
        self.rng.shuffle(chosen)
        for tool in chosen:
            shown = offer(tool, self.rng)
            while shown.name in self.offered_names:
                shown = offer(tool, self.rng)
            self._offered[tool.name] = shown

    def offered(self, tool: Tool) -> Offered:
        return self._offered[tool.name]

    @property
    def offered_names(self) -> list[str]:
        return [shown.name for shown in self._offered.values()]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The offered tools in OpenAI form."""
        return [shown.schema() for shown in self._offered.values()]

    def name(self, tool: Tool) -> str:
        """The name under which `tool` is offered."""
        return self._offered[tool.name].name

    def arguments(self, tool: Tool, values: dict[str, Value]) -> dict[str, Any]:
        """Values as the arguments of a call."""
        return self._offered[tool.name].arguments(values)

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def answer(self, reasoning: str, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text, "reasoning_content": reasoning})

    def call(self, reasoning: str, calls: Sequence[tuple[Tool, dict[str, Value]]]) -> None:
        """An assistant turn with calls; each waits for a `result`."""
        made = []
        for tool, values in calls:
            self._calls += 1
            self._waiting.append(f"c{self._calls}")
            arguments = json.dumps(self.arguments(tool, values), ensure_ascii=False)
            function = {"name": self.name(tool), "arguments": arguments}
            made.append({"id": self._waiting[-1], "type": "function", "function": function})
        self.messages.append(
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": reasoning,
                "tool_calls": made,
            }
        )

    def result(self, result: dict[str, Any]) -> None:
        """The result of the oldest call that waits for one."""
        text = json.dumps(result, ensure_ascii=False)
        call = self._waiting.pop(0)
        self.messages.append({"role": "tool", "tool_call_id": call, "content": text})

    def reason_call(self, request: str, tool: Tool, values: dict[str, Value]) -> str:
        """The reasoning before one call."""
        names = self.offered(tool).names
        unused = [names[param.name] for param in tool.params if param.name not in values]
        arguments = self.arguments(tool, values)
        return self.reasoning.call(request, self.name(tool), tool.does, arguments, unused)

    def reason_calls(self, request: str, calls: Sequence[tuple[Tool, dict[str, Value]]]) -> str:
        """The reasoning before several calls."""
        made = [(self.name(tool), self.arguments(tool, values)) for tool, values in calls]
        return self.reasoning.calls(request, made)

    def reason_first(self, request: str, tool: Tool, values: dict[str, Value], second: Tool) -> str:
        """The reasoning before the first of two calls that depend on each other."""
        return self.reasoning.first(
            request, self.name(tool), tool.does, self.arguments(tool, values), self.name(second)
        )
