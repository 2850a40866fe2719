"""Outputs and inputs of a run: what is refused before a model is loaded, and what is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from whiflash_agents.batch.inputs import readable_twice
from whiflash_agents.batch.writer import OutputFile
from whiflash_agents.engine.errors import OutputError, TraceError


def test_existing_output_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("done\n")
    with pytest.raises(OutputError, match=r"already holds something.*--overwrite.*overwrite=True"):
        OutputFile(path)
    assert path.read_text() == "done\n"


def test_overwrite_replaces_the_file_only_when_the_first_row_is_due(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("done\n")
    with OutputFile(path, overwrite=True):
        pass
    assert path.read_text() == "done\n"
    with OutputFile(path, overwrite=True) as output:
        output.write(b"new\n")
        assert path.read_bytes() == b"new\n"  # flushed row by row
        output.write(b"er\n")
    assert path.read_bytes() == b"new\ner\n"


def test_empty_existing_file_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.touch()
    with OutputFile(path) as output:
        output.write(b"row\n")
    assert path.read_bytes() == b"row\n"


def test_file_without_rows_is_removed_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with OutputFile(path):
        assert path.exists()
    assert not path.exists()


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_output_that_is_an_input_is_refused_even_with_overwrite(tmp_path: Path, link) -> None:  # type: ignore[no-untyped-def]
    traces = tmp_path / "traces.jsonl"
    traces.write_text("trace\n")
    place = traces
    if link is not None:
        place = tmp_path / "other.jsonl"
        link(traces, place)
    with pytest.raises(OutputError, match="is the same file as"):
        OutputFile(place, inputs=[traces], overwrite=True)
    assert traces.read_text() == "trace\n"


@pytest.mark.parametrize(
    ("place", "expected"),
    [(".", "is a directory"), ("missing/rows.jsonl", "there is no directory")],
)
def test_impossible_place_is_refused(tmp_path: Path, place: str, expected: str) -> None:
    with pytest.raises(OutputError, match=expected):
        OutputFile(tmp_path / place)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_told_with_its_reason() -> None:
    output = OutputFile("/dev/full")
    with pytest.raises(OutputError, match="cannot write: No space left"):
        output.write(b"row\n")


def test_only_rows_reach_standard_output(tmp_path: Path) -> None:
    program = """
import os, sys
from whiflash_agents.batch.writer import OutputFile
with OutputFile("-") as output:
    print("a library prints")
    os.write(1, b"a C library prints\\n")
    output.write(b"row\\n")
print("after")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"row\nafter\n"
    assert b"a library prints" in done.stderr
    assert b"a C library prints" in done.stderr


def test_reader_that_closes_the_pipe_is_an_output_error() -> None:
    program = """
import sys
from whiflash_agents.batch.writer import OutputFile
from whiflash_agents.engine.errors import OutputError
sys.stdin.readline()
try:
    with OutputFile("-") as output:
        output.write(b"row\\n")
except OutputError as error:
    sys.exit(str(error))
"""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=writer,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    os.close(reader)
    _, errors = process.communicate(b"go\n", timeout=60)
    assert process.returncode == 1
    assert errors == b"standard output: its reader has closed it\n"


def test_pipe_is_spooled_and_can_be_read_twice(tmp_path: Path) -> None:
    pipe = tmp_path / "traces.jsonl"
    os.mkfifo(pipe)
    feeder = threading.Thread(target=pipe.write_text, args=("one\ntwo\n",))
    feeder.start()
    plain = tmp_path / "plain.jsonl"
    with readable_twice([plain, pipe]) as paths:
        feeder.join()
        assert paths[0] == plain
        assert paths[1].name == "traces.jsonl"
        assert paths[1].read_text() == paths[1].read_text() == "one\ntwo\n"
    assert not paths[1].exists()


def test_no_input_and_standard_input_twice_are_refused() -> None:
    with pytest.raises(TraceError, match="no trace file"), readable_twice([]):
        pass
    with pytest.raises(TraceError, match="named twice"), readable_twice(["-", "-"]):
        pass
