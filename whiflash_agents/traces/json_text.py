"""Strict JSON in, or a `RecordError` that says what is wrong with it.

One answer for each oddity that JSON readers disagree about (failure kind 20): NaN and Infinity,
integers beyond 64 bits, lone surrogates, bad UTF-8 and very deep nesting are all refused, because
none of them survives being written again by every reader of our output.
"""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

import orjson

from .problems import RecordError, shown

MAX_DEPTH = 128  # levels of lists and objects; writers give up at about 250
MAX_LITERAL_CHARS = 1 << 20  # a Python literal takes about 100 times its text while it is parsed

# Whether 19 digits stand in a row, and how many brackets open, is asked of every record; passes in
# C over a text with one kind of digit and bracket answer ten times faster than an expression.
_ONE_KIND = bytes.maketrans(b"123456789{", b"000000000[")
_LONG_INTEGER = b"0" * 19
_INTEGERS = range(-(2**63), 2**64)


def parse_json(data: bytes, field: str | None = None) -> Any:
    """The value of a complete JSON text.

    Raises RecordError, at `field`, for anything that is not JSON in UTF-8, for an integer outside
    64 bits and for nesting deeper than MAX_DEPTH.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _explained(data, field, error) from None
    refuse_unwritable(data, value, field)
    return value


def refuse_unwritable(data: bytes, value: Any, field: str | None) -> None:
    """Raises RecordError if `value`, which orjson read from `data`, cannot be written back as it
    was: an integer outside 64 bits, or nesting deeper than MAX_DEPTH."""
    alike = data.translate(_ONE_KIND)
    if _LONG_INTEGER in alike:
        _refuse_huge_integers(data, field)
    if alike.count(b"[") > MAX_DEPTH:
        refuse_deep_nesting(value, field)


def parse_python_literal(text: str, field: str | None) -> Any:
    """The JSON value of a Python literal, as older recordings hold (`{'name': 'f'}`).

    Only literals are read (`ast.literal_eval`); nothing in `text` is ever executed. Raises
    RecordError, at `field`, for anything else and for values that JSON does not have.
    """
    remedy = "write it as JSON"
    if len(text) > MAX_LITERAL_CHARS:
        raise RecordError(
            field, f"a Python literal of {len(text)} characters is over {MAX_LITERAL_CHARS}", remedy
        )
    try:
        with warnings.catch_warnings():  # Python warns of escapes such as "\\d"
            warnings.simplefilter("ignore")
            value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)  # orjson would write infinity as null
        data = orjson.dumps(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        # orjson.JSONEncodeError is a TypeError
        raise RecordError(
            field, f"neither JSON nor a Python literal: {shown(text)} ({error})", remedy
        ) from None
    refuse_deep_nesting(value, field)
    return orjson.loads(data)


def refuse_deep_nesting(value: Any, field: str | None) -> None:
    """Raises RecordError if lists and objects in `value` nest deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, (list, tuple)):
                inner.extend(item)
        if not inner:
            return
        level = inner
    raise RecordError(
        field, f"lists and objects nest deeper than {MAX_DEPTH} levels", "flatten the value"
    )


def _refuse_huge_integers(data: bytes, field: str | None) -> None:
    # orjson reads an integer beyond 64 bits as a float: silently another number.
    def checked(digits: str) -> int:
        if len(digits) > 20 or int(digits) not in _INTEGERS:
            raise RecordError(
                field,
                f"the integer {shown(digits).strip(chr(39))} does not fit 64 bits",
                "write it as a string",
            )
        return int(digits)

    try:
        json.loads(data, parse_int=checked)
    except RecursionError:
        raise RecordError(
            field, f"lists and objects nest deeper than {MAX_DEPTH} levels", "flatten the value"
        ) from None


def _explained(data: bytes, field: str | None, error: json.JSONDecodeError) -> RecordError:
    """The RecordError for a text that is not JSON, with the usual causes told by name."""
    if data.startswith(b"\xef\xbb\xbf"):
        return RecordError(
            field,
            "a byte-order mark stands inside the file",
            "remove it; it is only ignored at the start of a file",
        )
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as bad:
        return RecordError(
            field,
            f"byte {bad.start} of the record (0x{data[bad.start]:02x}) is not valid UTF-8",
            "save the file as UTF-8",
        )

    def refused(name: str) -> None:
        raise RecordError(field, f"{name} is not JSON", "write null or a string instead")

    try:
        json.loads(data, parse_constant=refused)
    except RecordError as constant:
        return constant
    except (ValueError, RecursionError):
        pass  # not the cause; the parser's own words follow
    remedy = "write one complete JSON value per line"
    if "unexpected content after document" in str(error):
        remedy = "write each record on a line of its own"
    place = f"line {error.lineno}, " if error.lineno > 1 else ""
    place += f"column {error.colno} of the record"
    if "infinity" in error.msg:
        return RecordError(field, f"a number is too large: {place}", "write it as a string")
    return RecordError(field, f"not valid JSON: {error.msg} at {place}", remedy)
