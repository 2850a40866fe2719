"""Recorded agent traces: the schema, one reader per format, validation.

`read_traces` and `scan_traces` stream traces from files in any of the known formats; `validate`
counts and tells every problem. Docs: `docs/traces.md`.
"""

from .formats import FORMATS, TraceFormat
from .problems import RecordError, TraceProblem
from .records import MAX_RECORD_BYTES, display_name
from .scan import read_traces, scan_traces
from .schema import Message, Role, ToolCall, Trace
from .validation import FileReport, ValidationReport, validate

__all__ = [
    "FORMATS",
    "MAX_RECORD_BYTES",
    "FileReport",
    "Message",
    "RecordError",
    "Role",
    "ToolCall",
    "Trace",
    "TraceFormat",
    "TraceProblem",
    "ValidationReport",
    "display_name",
    "read_traces",
    "scan_traces",
    "validate",
]
