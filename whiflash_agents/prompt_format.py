"""Messages to the text of a prompt, through the chat template of a model.

Templates disagree on how a message is to be handed to them (None or empty content, arguments as an
object or as JSON text, the name of the reasoning), so `PromptFormat` finds out by trying.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import regex  # type: ignore[import-untyped]

from whiflash_agents.engine.errors import CheckpointError, RequestError

from .traces.schema import Message, ToolCall

_PROBE = {"probe": "value"}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
_PROBE_QUESTION = {"role": "user", "content": "x"}


class PromptFormat:
    """The chat template of `tokenizer`, or `chat_template` in its place.

    Raises:
        CheckpointError: there is no chat template, or it is not written correctly.
    """

    def __init__(self, tokenizer: Any, name: str, chat_template: str | None) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._chat_template = chat_template
        if not self.template_text:
            raise CheckpointError(
                f"{name} has no chat template, so conversations cannot be turned into prompts: "
                "use an instruction-tuned model, or put its template into the model's folder as "
                "chat_template.jinja"
            )
        self._check_syntax()

    def _check_syntax(self) -> None:
        """A template that cannot be compiled is told now, not with every conversation."""
        from jinja2 import TemplateSyntaxError

        for tools in ([], [_PROBE_TOOL]):  # a tokenizer may have a template of its own for tools
            try:
                self._apply([_PROBE_QUESTION], tools, True)
            except TemplateSyntaxError as error:
                reason = (error.message or "").rstrip(".")
                raise CheckpointError(
                    f"the chat template of {self._name} is not valid: line {error.lineno}: "
                    f"{reason}. Correct it (chat_template.jinja, or chat_template in "
                    "tokenizer_config.json), or fetch the model again"
                ) from error
            except Exception:  # it wants other messages than these; those it refuses are told later
                continue

    @cached_property
    def shows_tools(self) -> bool:
        """Whether tools change the prompt at all. True for a template that refuses to be asked."""
        try:
            with_tool, without = (
                self._apply([_PROBE_QUESTION], tools, True) for tools in ([_PROBE_TOOL], [])
            )
        except Exception:  # a template that wants other messages than these
            return True
        return with_tool != without

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        generation_prompt: bool,
    ) -> str:
        """The conversation as text, with or without the opening of the assistant's next turn.

        Raises:
            RequestError: the template refuses the conversation.
        """
        keep_none, arguments_as_text = self._message_style
        plain = [
            _to_template(message, self._reasoning_names, keep_none, arguments_as_text)
            for message in messages
        ]
        try:
            return self._apply(plain, list(tools), generation_prompt)
        except Exception as error:  # templates are programs: they raise whatever they like
            raise RequestError(
                f"the chat template of {self._name} refuses this conversation: "
                f"{type(error).__name__}: {error}. Roles: "
                f"{', '.join(message.role for message in messages) or 'none'}. Change the messages "
                "to what the model supports, or use another model or chat template"
            ) from error

    def _apply(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], generation_prompt: bool
    ) -> str:
        return self._tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            chat_template=self._chat_template,
            add_generation_prompt=generation_prompt,
            tokenize=False,
        )

    @cached_property
    def generation_prompt(self) -> str:
        """What the template writes to open the assistant's turn; empty if it cannot be told."""
        asked = [_PROBE_QUESTION]
        try:
            closed, opened = self._apply(asked, [], False), self._apply(asked, [], True)
        except Exception:  # a template that wants other messages than these
            return ""
        return opened[len(closed) :] if opened.startswith(closed) else ""

    @property
    def turn_anchor(self) -> str:
        """The part of the generation prompt that opens the turn, without a `<think>` after it."""
        return self.generation_prompt.split("<think>")[0]

    @cached_property
    def _message_style(self) -> tuple[bool, bool]:
        """(keep content None, arguments as JSON text): what the template prints properly, found by
        trying. Templates disagree, and a wrong guess prints `None` or a Python dict."""
        for keep_none, as_text in ((True, False), (False, False), (True, True), (False, True)):
            call = ToolCall(name="probe", arguments=_PROBE)
            messages = [
                _to_template(message, (), keep_none, as_text)
                for message in (
                    Message(role="user", content="x"),
                    Message(role="assistant", tool_calls=[call]),
                )
            ]
            try:
                text = self._apply(messages, [], False)
                nones = self._apply(messages[:1], [], False).count("None")
            except Exception:  # this style makes the template fail; try the next
                continue
            double = json.dumps(json.dumps(_PROBE))
            if text.count("None") <= nones and str(_PROBE) not in text and double not in text:
                return keep_none, as_text
        return False, False

    @cached_property
    def _reasoning_names(self) -> tuple[str, ...]:
        template = self.template_text
        names = [
            name
            for name in ("reasoning_content", "reasoning", "thinking")
            if regex.search(rf"\b{name}\b", template)
        ]
        return tuple(names)

    @property
    def template_text(self) -> str:
        if self._chat_template is not None:
            return self._chat_template
        own = getattr(self._tokenizer, "chat_template", None)
        return "\n".join(own.values()) if isinstance(own, dict) else own or ""


def _to_template(
    message: Message, reasoning_names: Sequence[str], keep_none: bool, arguments_as_text: bool
) -> dict[str, Any]:
    """A message as chat templates expect it; keys without a value are left out, because templates
    ask whether they exist."""
    content = message.content
    if content is None and not (keep_none and message.tool_calls):
        content = ""
    out: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning_content:
        out |= dict.fromkeys(reasoning_names, message.reasoning_content)
    if message.tool_calls:
        out["tool_calls"] = [
            _call_to_template(call, arguments_as_text) for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        out["name"] = message.name
    return out


def _call_to_template(call: ToolCall, arguments_as_text: bool) -> dict[str, Any]:
    arguments: Any = call.arguments
    if arguments_as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    out: dict[str, Any] = {} if call.id is None else {"id": call.id}
    return out | {"type": "function", "function": {"name": call.name, "arguments": arguments}}
