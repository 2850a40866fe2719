"""How records stand in files: lines, lists, documents, compression, and every oddity of bytes.

Each oddity has one answer (failure kind 20); docs/traces.md lists them.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import zstandard

from whiflash_agents.engine.errors import TraceError
from whiflash_agents.traces import Trace, TraceProblem, read_traces, scan_traces

zstd = zstandard.ZstdCompressor(write_checksum=True).compress
USER = {"role": "user", "content": "hi"}
TURN = {"role": "assistant", "content": "ho"}


def record(trace_id: str | None = None, **extra: Any) -> dict[str, Any]:
    own_id = {} if trace_id is None else {"id": trace_id}
    return {**own_id, "messages": [USER, TURN], **extra}


def line(trace_id: str | None = None, **extra: Any) -> bytes:
    return json.dumps(record(trace_id, **extra)).encode() + b"\n"


def scan(path: Path | str, data: bytes | None = None, **options: Any) -> list[str]:
    """Ids of traces, and `line N: field: message` of problems, in order."""
    if data is not None:
        Path(path).write_bytes(data)
    told = []
    for item in scan_traces([path], **options):
        if isinstance(item, Trace):
            told.append(item.id)
        else:
            assert str(item).startswith(f"{item.path}:{item.line}: " if item.line else item.path)
            assert item.remedy
            told.append(f"line {item.line}: {item.field}: {item.message}")
    return told


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    return tmp_path / "t.jsonl"


class TestLines:
    def test_crlf_blank_lines_and_a_missing_last_newline(self, jsonl: Path) -> None:
        data = line("a").replace(b"\n", b"\r\n") + b"\r\n  \n\n" + line("b").strip()
        assert scan(jsonl, data) == ["a", "b"]

    def test_a_byte_order_mark_is_skipped_at_the_start_only(self, jsonl: Path) -> None:
        mark = b"\xef\xbb\xbf"
        told = scan(jsonl, mark + line("a") + mark + line("b") + line("c"))
        assert told == ["a", "line 2: None: a byte-order mark stands inside the file", "c"]

    def test_utf_16_is_refused(self, jsonl: Path) -> None:
        assert scan(jsonl, line("a").decode().encode("utf-16")) == [
            "line None: None: the file is UTF-16"
        ]

    def test_bad_utf_8_is_told_by_byte_and_reading_goes_on(self, jsonl: Path) -> None:
        bad = b'{"id": "b", "messages": [{"role": "user", "content": "caf\xe9"}]}\n'
        told = scan(jsonl, line("a") + bad + line("c"))
        assert told[0], told[2] == ("a", "c")
        assert (
            told[1]
            == f"line 2: None: byte {bad.index(0xE9)} of the record (0xe9) is not valid UTF-8"
        )

    def test_lines_end_at_newlines_only(self, jsonl: Path) -> None:
        text = "a\u2028b\u0085c"
        data = json.dumps({"id": text, "messages": [USER, TURN]}, ensure_ascii=False).encode()
        assert scan(jsonl, data.replace(b", ", b",\r") + b"\n") == [text]

    @pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
    def test_nan_and_infinity_are_refused_by_name(self, jsonl: Path, name: str) -> None:
        data = line("a", score=1.5).replace(b"1.5", name.encode())
        assert scan(jsonl, data) == [f"line 1: None: {name} is not JSON"]

    @pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"1" + b"0" * 5000])
    def test_a_number_beyond_double_is_refused(self, jsonl: Path, number: bytes) -> None:
        (told,) = scan(jsonl, line("a", score=1.5).replace(b"1.5", number))
        assert told.startswith("line 1: None: a number is too large: column ")

    @pytest.mark.parametrize("number", [2**64 - 1, -(2**63), 10**18])
    def test_integers_of_64_bits_are_exact(self, jsonl: Path, number: int) -> None:
        jsonl.write_bytes(line("a", seed=number))
        (trace,) = read_traces([jsonl])
        assert trace.metadata["seed"] == number

    @pytest.mark.parametrize("digits", [str(2**64), str(-(2**63) - 1), "1" + "0" * 300])
    def test_larger_integers_are_refused(self, jsonl: Path, digits: str) -> None:
        (told,) = scan(jsonl, line("a", seed=1).replace(b'"seed": 1', f'"seed": {digits}'.encode()))
        assert "does not fit 64 bits" in told

    def test_larger_integers_in_arguments_are_refused_by_field(self, jsonl: Path) -> None:
        call = {"function": {"name": "f", "arguments": json.dumps({"x": 2**70})}}
        (told,) = scan(jsonl, line("a", messages=[{"role": "assistant", "tool_calls": [call]}]))
        assert told.startswith("line 1: messages[0].tool_calls[0].function.arguments: the integer")

    def test_long_runs_of_digits_in_text_are_no_numbers(self, jsonl: Path) -> None:
        data = line("a", note="1" * 400, pi=3.14159265358979323846264338327950288)
        assert scan(jsonl, data) == ["a"]

    def test_lone_surrogates_are_refused(self, jsonl: Path) -> None:
        (told,) = scan(jsonl, line("a", note="x").replace(b'"x"', b'"\\ud800"'))
        assert "not valid JSON" in told

    @pytest.mark.parametrize("depth", [200, 5000, 200_000])
    def test_deep_nesting_is_refused(self, jsonl: Path, depth: int) -> None:
        data = line("a", x=1).replace(b'"x": 1', b'"x": ' + b"[" * depth + b"]" * depth)
        (told,) = scan(jsonl, data)
        assert "nest" in told or "depth" in told

    def test_nesting_of_a_hundred_levels_is_read(self, jsonl: Path) -> None:
        data = line("a", x=1).replace(b'"x": 1', b'"x": ' + b"[" * 100 + b"]" * 100)
        assert scan(jsonl, data) == ["a"]

    @pytest.mark.parametrize("newline", [b"\n", b""])
    def test_a_line_over_the_limit_is_refused_and_reading_goes_on(
        self, jsonl: Path, newline: bytes
    ) -> None:
        long = line("long", note="x" * 5000).strip() + newline
        after = line("b") if newline else b""
        told = scan(jsonl, line("a") + long + after, max_record_bytes=1000)
        assert told[:2] == [
            "a",
            "line 2: None: the line is longer than the limit of 1000 bytes",
        ]
        assert told[2:] == (["b"] if newline else [])

    def test_a_line_of_100_mb_is_refused_by_default_without_holding_it(self, jsonl: Path) -> None:
        with jsonl.open("wb") as file:
            file.write(line("a"))
            for _ in range(100):
                file.write(b"x" * 1_000_000)
            file.write(b"\n" + line("b"))
        tracemalloc.start()
        told = scan(jsonl)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert told[0], told[2] == ("a", "b")
        assert "limit of 67108864 bytes" in told[1]
        assert peak < 150_000_000

    def test_broken_and_doubled_lines_are_told_and_reading_goes_on(self, jsonl: Path) -> None:
        told = scan(jsonl, b'{"messages": [\n' + line("a").strip() + line("b") + line("c"))
        assert told[0].startswith("line 1: None: not valid JSON")
        assert told[1].startswith("line 2: None: not valid JSON: unexpected content after")
        assert told[2] == "c"


class TestIds:
    def test_missing_ids_are_file_and_line(self, tmp_path: Path) -> None:
        path = tmp_path / "runs.jsonl.gz"
        path.write_bytes(gzip.compress(line() + b"\n" + line("x") + line(id="") + line(id=None)))
        assert scan(path) == ["runs:1", "x", "runs:4", "runs:5"]

    def test_files_called_alike_get_ids_of_their_own(self, tmp_path: Path) -> None:
        paths = [tmp_path / folder / "t.jsonl" for folder in "abc"]
        for path in paths:
            path.parent.mkdir()
            path.write_bytes(line())
        assert [trace.id for trace in read_traces(paths)] == ["t:1", "t~2:1", "t~3:1"]

    def test_elements_of_a_list_are_numbered_from_0(self, tmp_path: Path) -> None:
        path = tmp_path / "l.json"
        assert scan(path, json.dumps([record(), record()]).encode()) == ["l:0", "l:1"]

    @pytest.mark.parametrize(
        ("ids", "expected"),
        [
            ({"custom_id": "a", "id": "b"}, "a"),
            ({"trace_id": "c"}, "c"),
            ({"instance_id": "d"}, "d"),
            ({"id": 7}, "7"),
            ({"task_id": 4, "trial": 2}, "4-trial-2"),
            ({"task_id": 4}, "4"),
        ],
    )
    def test_ids_come_from_the_usual_keys(
        self, jsonl: Path, ids: dict[str, Any], expected: str
    ) -> None:
        assert scan(jsonl, line(**ids)) == [expected]

    def test_duplicates_are_refused_across_files_and_the_first_place_told(
        self, tmp_path: Path
    ) -> None:
        first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
        first.write_bytes(b"\n" + line("a") + line("b"))
        second.write_bytes(line("c") + line("b") + line("d"))
        items = list(scan_traces([first, second]))
        assert [item.id for item in items if isinstance(item, Trace)] == ["a", "b", "c", "d"]
        (problem,) = (item for item in items if isinstance(item, TraceProblem))
        assert (problem.line, problem.field, problem.trace_id) == (2, "id", "b")
        assert f"{first}:3" in problem.message
        with pytest.raises(TraceError, match=r"2\.jsonl:2: id: 'b' is also"):
            list(read_traces([first, second]))


class TestLists:
    def test_elements_are_told_by_place_and_line(self, tmp_path: Path) -> None:
        data = json.dumps([record("a"), {"messages": 3}, 7, record("b")], indent=1).encode()
        told = scan(tmp_path / "l.json", b"\n" + data)
        assert told[0], told[3] == ("a", "b")
        bad = 2 + data.split(b'"messages": 3')[0].count(b"\n") - 1
        assert told[1].startswith(f"line {bad}: [1].messages: expected a list")
        assert told[2].startswith(f"line {bad + 3}: [2]: no known format: found 7")

    def test_strings_with_brackets_quotes_and_commas(self, tmp_path: Path) -> None:
        nasty = 'a"]},{[\\" \\\\" , é'
        data = json.dumps([record(nasty), record("b")]).encode()
        assert scan(tmp_path / "l.json", data) == [nasty, "b"]

    @pytest.mark.parametrize("chunk", [1, 2, 3, 7])
    def test_any_split_into_chunks_reads_the_same(
        self, tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("whiflash_agents.traces.json_list._CHUNK", chunk)
        data = json.dumps([record('\\"\\\\'), record("é"), record("c")], indent=2).encode()
        assert scan(tmp_path / "l.json", data) == ['\\"\\\\', "é", "c"]

    @pytest.mark.parametrize("data", [b"[]", b" [ ]\n", b"", b"\n \n"])
    def test_nothing_gives_nothing(self, tmp_path: Path, data: bytes) -> None:
        assert scan(tmp_path / "l.json", data) == []

    @pytest.mark.parametrize(
        ("tail", "message"),
        [
            (b"", "the JSON list is not closed"),
            (b", ", "the JSON list is not closed"),
            (b",]", "a comma with nothing beside it"),
            (b"] x", "there is more after the end of the JSON list"),
            (b', {"a": ]]', "not valid JSON"),
        ],
    )
    def test_broken_lists_give_what_is_whole(
        self, tmp_path: Path, tail: bytes, message: str
    ) -> None:
        whole = b"[" + line("a").strip() + b"," + line("b").strip()
        told = scan(tmp_path / "l.json", whole + tail)
        assert told[0] == "a"
        assert any(message in text for text in told[1:])
        assert all(text == "b" or text.startswith("line 1: ") for text in told[1:])

    def test_an_element_over_the_limit_is_refused_and_reading_goes_on(self, tmp_path: Path) -> None:
        data = json.dumps([record("a"), record("x", note="y" * 900_000), record("b")]).encode()
        told = scan(tmp_path / "l.json", data, max_record_bytes=1000)
        assert told == [
            "a",
            "line 1: [1]: the element is longer than the limit of 1000 bytes",
            "b",
        ]

    def test_memory_is_bounded_by_the_largest_element(self, tmp_path: Path) -> None:
        path = tmp_path / "l.json"
        with path.open("wb") as file:
            file.write(b"[")
            for number in range(300):
                file.write(line(str(number), note="y" * 100_000).strip() + b",")
            file.write(line("last").strip() + b"]")
        tracemalloc.start()
        count = sum(1 for _ in read_traces([path]))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert count == 301
        assert peak < 3_000_000  # the file has 30 MB


class TestDocuments:
    def test_a_pretty_printed_object_is_one_record(self, tmp_path: Path) -> None:
        data = json.dumps({"history": [USER, TURN]}, indent=2).encode()
        assert scan(tmp_path / "run.traj", data) == ["run:1"]
        assert scan(tmp_path / "run.txt", data) == ["run:1"]

    def test_an_object_broken_across_lines_is_one_record_in_json_files(
        self, tmp_path: Path
    ) -> None:
        data = line("a").replace(b", ", b",\n")
        assert scan(tmp_path / "a.json", data) == ["a"]

    def test_lines_in_a_json_file_are_lines(self, tmp_path: Path) -> None:
        assert scan(tmp_path / "a.json", line("a") + line("b")) == ["a", "b"]

    def test_a_list_of_messages_is_one_record(self, tmp_path: Path) -> None:
        data = json.dumps([USER, TURN]).encode()
        assert scan(tmp_path / "one.json", data) == ["one:1"]
        assert scan(tmp_path / "pretty.json", json.dumps([USER, TURN], indent=1).encode()) == [
            "pretty:1"
        ]

    @pytest.mark.parametrize("suffix", ["jsonl", "txt", "json"])
    def test_lines_of_lists_of_messages(self, tmp_path: Path, suffix: str) -> None:
        lists = b"".join(json.dumps([USER, TURN]).encode() + b"\n" for _ in range(2))
        assert scan(tmp_path / f"m.{suffix}", lists) == ["m:1", "m:2"]

    def test_a_document_over_the_limit_is_refused(self, tmp_path: Path) -> None:
        data = json.dumps(record("a", note="x" * 2000), indent=1).encode()
        assert scan(tmp_path / "a.traj", data, max_record_bytes=1000) == [
            "line 1: None: the document is longer than the limit of 1000 bytes"
        ]

    def test_a_broken_document_tells_the_line_inside_it(self, tmp_path: Path) -> None:
        data = json.dumps(record("a"), indent=1).replace('"role": "user"', "'role'").encode()
        (told,) = scan(tmp_path / "a.traj", data)
        assert "at line 5, column" in told


class TestSources:
    @pytest.mark.parametrize("suffix", [".gz", ".zst", ""])
    @pytest.mark.parametrize("pack", [gzip.compress, zstd])
    def test_compression_is_told_by_content(self, tmp_path: Path, suffix: str, pack: Any) -> None:
        data = pack(line("a")) + pack(line() + line("c"))  # two members one after the other
        assert scan(tmp_path / f"t.jsonl{suffix}", data) == [
            "a",
            "t:2",
            "c",
        ]

    @pytest.mark.parametrize("pack", [gzip.compress, zstd])
    def test_damaged_compression_is_told_after_what_could_be_read(
        self, tmp_path: Path, pack: Any
    ) -> None:
        noise = random.Random(0).randbytes(400_000).hex()
        whole = line("a") + line("b", note=noise)
        path = tmp_path / "t.jsonl.x"
        told = scan(path, pack(whole)[:-60_000])
        assert told[0] == "a"
        assert "reading stopped here" in told[-1]
        damaged = bytearray(pack(whole))
        damaged[100_000:100_100] = bytes(100)
        assert "reading stopped here" in scan(path, bytes(damaged))[-1]

    @pytest.mark.parametrize("pack", [gzip.compress, zstd])
    def test_a_compressed_file_cut_at_any_byte_is_told(self, tmp_path: Path, pack: Any) -> None:
        data = pack(line("a")) + pack(line("b"))
        cuts = {size: scan(tmp_path / "t.jsonl", data[:size]) for size in range(5, len(data))}
        whole_members = [size for size, told in cuts.items() if told == ["a"]]
        assert whole_members == [len(pack(line("a")))]
        assert all("line" in told[-1] for size, told in cuts.items() if size not in whole_members)

    def test_stdin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Stdin:
            buffer = io.BytesIO(gzip.compress(line() + b"oops\n"))

        monkeypatch.setattr(sys, "stdin", Stdin)
        items = list(scan_traces(["-"]))
        assert isinstance(items[0], Trace)
        assert items[0].id == "stdin:1"
        assert str(items[1]).startswith("<stdin>:2: not valid JSON")

    def test_stdin_can_be_named_once(self) -> None:
        with pytest.raises(TraceError, match="named twice"):
            list(scan_traces(["-", "-"]))

    def test_unreadable_files_are_told_and_the_others_read(self, tmp_path: Path) -> None:
        good = tmp_path / "t.jsonl"
        good.write_bytes(line("a"))
        missing = tmp_path / "missing.jsonl"
        items = list(scan_traces([missing, tmp_path, "nul\0", good]))
        assert [str(item).partition(": ")[2][:17] for item in items[:3]] == [
            "cannot be read: N",
            "cannot be read: I",
            "cannot be read: e",
        ]
        assert isinstance(items[3], Trace)
        with pytest.raises(TraceError, match=r"missing\.jsonl: cannot be read"):
            next(read_traces([missing]))

    def test_limit_stops_before_a_later_problem(self, jsonl: Path) -> None:
        jsonl.write_bytes(line("a") + line("b") + b"oops\n")
        assert [trace.id for trace in read_traces([jsonl], limit=2)] == ["a", "b"]
        with pytest.raises(TraceError, match=r"t\.jsonl:3: not valid JSON"):
            list(read_traces([jsonl], limit=3))

    def test_reading_is_lazy(self, jsonl: Path) -> None:
        jsonl.write_bytes(line("a") + b"oops\n")
        assert next(read_traces([jsonl])).id == "a"
