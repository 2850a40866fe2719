"""Lines per second and peak memory of trace validation, on generated files of growing length.

    python benchmarks/validate_throughput.py [--lines 100000 500000 1000000] [--json FILE]

Each length runs in a process of its own, so that its peak resident memory is its own. A line is a
small trace: system prompt, user, a tool call, its answer, a final turn (about 500 bytes). On a
machine that is busy with other work, look at the figure per CPU second.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

_MEASURED = """
import resource, sys, time
from whiflash_agents.traces import validate
started, cpu = time.perf_counter(), time.process_time()
report = validate([sys.argv[1]])
seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
assert report.ok and report.total("warnings") == 0, report
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(report.total("records"), report.total("tool_calls"), seconds, cpu, peak)
"""


def small_trace(number: int) -> dict[str, object]:
    """One record in OpenAI form, of about 500 bytes."""
    call = {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "get_weather", "arguments": json.dumps({"city": f"Town {number}"})},
    }
    return {
        "custom_id": f"trace-{number}",
        "messages": [
            {"role": "system", "content": "You answer questions about the weather."},
            {"role": "user", "content": f"What is the weather in Town {number}?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": '{"celsius": 21}'},
            {"role": "assistant", "content": f"It is 21 °C in Town {number}."},
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", type=int, nargs="+", default=[100_000, 500_000, 1_000_000])
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    options = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traces.jsonl"
        written = 0
        for lines in sorted(options.lines):
            with path.open("a", encoding="utf-8") as file:
                while written < lines:
                    file.write(json.dumps(small_trace(written), ensure_ascii=False) + "\n")
                    written += 1
            figures.append(measure(path))
    if options.json:
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        options.json.write_text(json.dumps({"machine": machine, "runs": figures}, indent=2) + "\n")


def measure(path: Path) -> dict[str, float]:
    """Validates `path` in a fresh process; the figures, which are printed as well."""
    command = [sys.executable, "-c", _MEASURED, str(path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    records, calls, seconds, cpu_seconds, peak_kib = (float(word) for word in output.split())
    figures = {
        "lines": records,
        "tool_calls": calls,
        "megabytes": path.stat().st_size / 1e6,
        "seconds": seconds,
        "lines_per_second": records / seconds,
        "lines_per_cpu_second": records / cpu_seconds,
        "peak_rss_mib": peak_kib / 1024,
    }
    print(
        f"{records:>9.0f} lines {figures['megabytes']:7.1f} MB {seconds:7.2f} s"
        f" {figures['lines_per_second']:8.0f} lines/s"
        f" ({figures['lines_per_cpu_second']:.0f} per CPU second),"
        f" peak RSS {figures['peak_rss_mib']:6.1f} MiB",
        flush=True,
    )
    return figures


if __name__ == "__main__":
    main()
