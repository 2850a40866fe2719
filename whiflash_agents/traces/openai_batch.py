"""Reader of OpenAI Batch request lines: `{"custom_id", "method", "url", "body": {...}}`.

The body is read like a record of the `openai` format; its other keys (`model`, `temperature`, ...)
become the trace's metadata. Only chat completions are read.
"""

from __future__ import annotations

from typing import Any

from .openai import read_id, read_messages, read_metadata, required
from .problems import RecordError, shown
from .schema import Trace
from .tool_schemas import read_tools

_CHAT_URL = "/v1/chat/completions"


class OpenAIBatchFormat:
    """`{"custom_id": ..., "body": {"messages": [...], ...}}` per record."""

    name = "openai-batch"
    looks_for = "`body`"

    def sniff(self, record: Any) -> bool:
        return isinstance(record, dict) and "body" in record

    def parse(self, record: Any, default_id: str) -> Trace:
        body = required(record, "body")
        url = record.get("url")
        if url is not None and (not isinstance(url, str) or not url.endswith("/chat/completions")):
            raise RecordError(
                "url",
                f"{shown(url)} is not a chat completion",
                f"only {_CHAT_URL} requests are read; remove the others",
            )
        if not isinstance(body, dict) or "messages" not in body:
            raise RecordError(
                "body.messages", "missing", f"write the body of a {_CHAT_URL} request"
            )
        try:
            tools = read_tools(body)
        except RecordError as error:
            raise error.inside("body") from None
        trace_id = read_id(record, default_id)
        return Trace.model_validate(
            {
                "id": trace_id,
                "messages": read_messages(body["messages"], "body.messages"),
                "tools": tools,
                "metadata": read_metadata(body, trace_id),
            }
        )
