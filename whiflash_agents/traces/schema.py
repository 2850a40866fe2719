"""The shape every recorded trace is read into: `Trace`, `Message`, `ToolCall`.

All readers produce these and everything above them (chat templates, batches, integrations) consumes
them. Unknown keys are ignored, because recordings carry plenty of them; a wrong type is an error.
"""

from __future__ import annotations

from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(BaseModel):
    """One call of a tool by the assistant.

    `arguments` is a dict, or the recorded string, verbatim, where it is not a JSON object.
    `id` is None where the recording's format has none.
    """

    model_config = ConfigDict(extra="ignore")

    id: str | None = None
    name: str
    arguments: dict[str, Any] | str

    def to_openai(self) -> dict[str, Any]:
        """The call as OpenAI writes it: arguments are one JSON string. `id` is left out if None."""
        arguments = self.arguments
        text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        call: dict[str, Any] = {} if self.id is None else {"id": self.id}
        return call | {"type": "function", "function": {"name": self.name, "arguments": text}}


class Message(BaseModel):
    """One message of a conversation, text only.

    `tool_calls` is empty on everything but assistant turns; `tool_call_id` and `name` say which
    call a tool message answers, as far as the recording knows.
    """

    model_config = ConfigDict(extra="ignore")

    role: Role
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None
    name: str | None = None

    def to_openai(self) -> dict[str, Any]:
        """The message as OpenAI writes it; optional keys that hold nothing are left out."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.to_openai() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message


class Trace(BaseModel):
    """One recorded conversation of an agent.

    `tools` are in OpenAI form, `{"type": "function", "function": {...}}`. `metadata` holds what
    else the record carried beside the messages (model, sampling parameters, reward, ...); which
    keys those are is told in the docstring of each format.
    """

    model_config = ConfigDict(extra="ignore")

    id: str
    messages: list[Message]
    tools: list[dict[str, Any]] = Field(default_factory=list)
    metadata: dict[str, Any] = Field(default_factory=dict)

    @property
    def assistant_turns(self) -> list[int]:
        """Indices into `messages` of the assistant turns, in order."""
        return [i for i, message in enumerate(self.messages) if message.role == "assistant"]

    def to_openai(self) -> dict[str, Any]:
        """The trace as one record of the `openai` format, which reads back equal.

        `metadata` returns to the top level of the record, where it is read from.
        """
        record: dict[str, Any] = {**self.metadata, "id": self.id}
        record["messages"] = [message.to_openai() for message in self.messages]
        if self.tools:
            record["tools"] = self.tools
        return record
