"""The words around a tool call, as one family of models writes them.

A layout says what a grammar needs to let a model write calls and nothing else: which text comes
before a call, between its name and its arguments, after it, and between two of them. Reading calls
back is the response template's work (`response_format.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CallLayout:
    """Calls of a turn: `begin`, then calls with `separator` between them, then `end`. A call is
    `before_name`, its name, `before_arguments`, its arguments, `after_arguments`.

    Attributes:
        arguments: "json" for one JSON object; "xml" for `<parameter=KEY>`, a line break, the value,
            a line break and `</parameter>` per argument, strings without quotes.
        reasoning: tags around reasoning, which may come before content and calls; None if the
            family has none.
        parallel: whether a turn may hold several calls.
        text_before: whether content may stand before the first call.
        trigger: what tells that calls begin, where content may come before them. Such text cannot
            occur in content then.
    """

    name: str
    before_name: str
    before_arguments: str
    after_arguments: str
    begin: str = ""
    separator: str = ""
    end: str = ""
    arguments: Literal["json", "xml"] = "json"
    reasoning: tuple[str, str] | None = ("<think>", "</think>")
    parallel: bool = True
    text_before: bool = True
    trigger: str = ""


HERMES = CallLayout(
    name="hermes",
    before_name='<tool_call>\n{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}\n</tool_call>",
    separator="\n",
    trigger="<tool_call>",
)
