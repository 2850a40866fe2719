"""Checks of a trace as a whole, after its reader accepted every part of it.

An error means that the history cannot be what an agent saw (an answer to a call that was never
made, a user who said nothing at all), so replaying it would mean nothing. Looseness that real
recordings show is a warning. Fields are those of the trace as read: `messages[2]`.
"""

from __future__ import annotations

from typing import NamedTuple

from .problems import Severity, shown
from .schema import Message, Trace


class Finding(NamedTuple):
    """One result of a check; the scan adds where the trace stands."""

    severity: Severity
    field: str | None
    message: str
    remedy: str


def check_trace(trace: Trace) -> list[Finding]:
    """Everything remarkable about the structure of `trace`, errors and warnings, in order."""
    if not trace.messages:
        return [Finding("error", "messages", "there are none", "record at least one message")]
    findings: list[Finding] = []
    known: set[str] = set()  # ids of all calls so far
    pending: list[str | None] = []  # ids of the calls that wait for an answer
    turns = 0
    for i, message in enumerate(trace.messages):
        if message.role == "tool":
            _check_answer(i, message, known, pending, findings)
            continue
        if pending:
            findings.append(
                Finding(
                    "warning",
                    f"messages[{i}]",
                    f"{len(pending)} tool call(s) before this message were never answered",
                    "a chat template may refuse this; record a tool message for each call",
                )
            )
            pending.clear()
        if message.role == "assistant":
            turns += 1
            if message.content and "<tool_call>" in message.content:
                findings.append(
                    Finding(
                        "warning",
                        f"messages[{i}].content",
                        "the text holds <tool_call>, which could not be read as a call",
                        "correct the call, unless the model wrote it so",
                    )
                )
            if message.tool_calls:
                _check_calls(i, trace, known, pending, findings)
                continue
        if not message.content:
            _check_empty(i, message, findings)
    if not turns and all(finding.severity == "warning" for finding in findings):
        findings.append(
            Finding(
                "warning",
                "messages",
                "no assistant turn, so there is nothing to replay",
                "use --mode continue for this trace",
            )
        )
    return findings


def _check_calls(
    i: int, trace: Trace, known: set[str], pending: list[str | None], findings: list[Finding]
) -> None:
    declared = {tool["function"]["name"] for tool in trace.tools}
    for j, call in enumerate(trace.messages[i].tool_calls):
        field = f"messages[{i}].tool_calls[{j}]"
        pending.append(call.id)
        if call.id is not None:
            if call.id in known:
                findings.append(
                    Finding(
                        "warning",
                        f"{field}.id",
                        f"the id {shown(call.id)} was used by an earlier call",
                        "answers are matched in order; give each call an id of its own",
                    )
                )
            known.add(call.id)
        if declared and call.name not in declared:
            findings.append(
                Finding(
                    "warning",
                    f"{field}.name",
                    f"{shown(call.name)} is not among the trace's tools",
                    f"declare it, or check the name against: {', '.join(sorted(declared)[:8])}",
                )
            )
        if isinstance(call.arguments, str):
            findings.append(
                Finding(
                    "warning",
                    f"{field}.arguments",
                    f"not a JSON object, kept as recorded: {shown(call.arguments)}",
                    "correct them if the model did not write them so",
                )
            )


def _check_answer(
    i: int,
    message: Message,
    known: set[str],
    pending: list[str | None],
    findings: list[Finding],
) -> None:
    call_id = message.tool_call_id
    field = f"messages[{i}].tool_call_id"
    if call_id is not None and call_id not in known:
        findings.append(
            Finding(
                "error",
                field,
                f"no call before this message has the id {shown(call_id)}",
                "correct the id, or remove the message",
            )
        )
    elif call_id in pending:
        pending.remove(call_id)
    elif call_id is None and pending:
        del pending[0]  # recordings without ids answer in order
    else:
        findings.append(
            Finding(
                "warning",
                field,
                "no call before this message waits for an answer",
                "check that the call was recorded, and that it is answered once",
            )
        )
    if message.content is None:
        findings.append(
            Finding(
                "warning",
                f"messages[{i}].content",
                "a tool message without content",
                'write "" if the tool returned nothing',
            )
        )


def _check_empty(i: int, message: Message, findings: list[Finding]) -> None:
    if message.role == "assistant":
        finding = Finding(
            "warning",
            f"messages[{i}]",
            "an assistant turn with neither text nor tool calls",
            "a replay has nothing to compare with; remove it if it is an artefact",
        )
    elif message.content is None:
        finding = Finding(
            "error",
            f"messages[{i}].content",
            f"a {message.role} message without content",
            "write its text, or remove the message",
        )
    else:
        finding = Finding(
            "warning",
            f"messages[{i}].content",
            f"a {message.role} message whose text is empty",
            "remove it if it is an artefact",
        )
    findings.append(finding)
