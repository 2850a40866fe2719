"""The registry of trace formats, and how a record's format is detected.

A new format is one module with one small class, and one entry in `FORMATS`.
"""

from __future__ import annotations

from typing import Any, Protocol

from whiflash_agents.engine.errors import TraceError

from .langchain import LangChainFormat
from .openai import OpenAIFormat
from .openai_batch import OpenAIBatchFormat
from .problems import RecordError, shown
from .schema import Trace
from .sharegpt import ShareGPTFormat
from .swe_agent import SweAgentFormat
from .tau_bench import TauBenchFormat


class TraceFormat(Protocol):
    """How one format is recognised and read.

    `sniff` looks at a few keys of a parsed record and claims it or not; no two formats claim the
    same record, so their order does not matter. `parse` raises RecordError
    for what it cannot read; `default_id` is the id of a record that has none of its own.
    """

    name: str
    looks_for: str

    def sniff(self, record: Any) -> bool: ...

    def parse(self, record: Any, default_id: str) -> Trace: ...


FORMATS: dict[str, TraceFormat] = {
    known.name: known
    for known in (
        OpenAIFormat(),
        OpenAIBatchFormat(),
        TauBenchFormat(),
        SweAgentFormat(),
        ShareGPTFormat(),
        LangChainFormat(),
    )
}


def find_format(name: str) -> TraceFormat:
    """The format called `name`. Raises TraceError, naming all formats, if there is none."""
    if name in FORMATS:
        return FORMATS[name]
    raise TraceError(
        f"--format {shown(name)} is not known: expected one of {', '.join(sorted(FORMATS))}"
    )


def detect_format(record: Any) -> TraceFormat:
    """The format that claims `record`. Raises RecordError, naming what was looked for, if none."""
    for known in FORMATS.values():
        if known.sniff(record):
            return known
    refuse_output_row(record)
    if isinstance(record, dict):
        keys = ", ".join(sorted(map(str, record))[:8]) or "none"
        found = f"an object with the keys: {keys}"
    else:
        found = shown(record)
    looked_for = "; ".join(f"{known.looks_for} ({known.name})" for known in FORMATS.values())
    raise RecordError(
        None,
        f"no known format: found {found}; looked for {looked_for}",
        "convert the record, or name its format with --format",
    )


def refuse_output_row(record: Any) -> None:
    """Raises RecordError if `record` is what a run wrote, ours or another one of OpenAI's kind."""
    if isinstance(record, dict) and "response" in record and "custom_id" in record:
        ours = "whiflash" in record
        made_by = "`whiflash-batch run`" if ours else "a batch"
        raise RecordError(
            None,
            f"this is an output row of {made_by}, not a trace",
            "name the traces that the run read" if ours else "name the requests of the batch",
        )


def is_message(value: Any) -> bool:
    """Whether `value` is one message, so that a list of such is one record."""
    return any(known.sniff([value]) for known in FORMATS.values())
