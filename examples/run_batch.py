"""Re-run recorded agent traces from Python: what `whiflash-batch run` does, in a few lines.

python examples/run_batch.py
python examples/run_batch.py --workers 1 --target path/to/model --output rows.jsonl
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from whiflash_agents.batch import LocalRunner, WhiFlashBatch
from whiflash_agents.engine.errors import WhiFlashError
from whiflash_agents.settings import Settings
from whiflash_agents.workers.pool import EnginePool

TRACES = Path(__file__).parent / "traces.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", default=[str(TRACES)])
    parser.add_argument("--target", help="model folder or hub name (default: the embedded model)")
    parser.add_argument("--workers", type=int, default=0, help="0 decodes in this process")
    parser.add_argument("--limit", type=int, help="number of traces")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--output", help="write the rows here instead of showing them")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    arguments = parser.parse_args()
    try:
        rerun(arguments)
    except WhiFlashError as error:  # whatever the user can mend: a missing file, a wrong setting
        print(f"run_batch.py: error: {error}", file=sys.stderr)
        sys.exit(2)


def rerun(arguments: argparse.Namespace) -> None:
    """Write or show the rows of the traces, then the figures of the run."""
    settings = Settings.of(
        target=arguments.target,
        workers=arguments.workers,
        limit=arguments.limit,
        max_tokens=arguments.max_tokens,
        router="lookup",  # draft from the prompt, the output so far and the recorded turn
    )
    batch = WhiFlashBatch(settings, runner=EnginePool if arguments.workers else LocalRunner)

    if arguments.output:
        batch.run(arguments.traces, arguments.output, overwrite=arguments.overwrite)
    else:
        for row in batch.rows(arguments.traces):
            show(row)

    figures = batch.figures
    print(
        f"{figures.ok} rows, {figures.failed} failed, {figures.generated_tokens} tokens, "
        f"{figures.tokens_per_second:.1f} tokens/s, acceptance length "
        f"{figures.speculation.mean_acceptance_length:.2f}"
    )


def show(row: dict) -> None:
    """One line per generated turn: its id, what it says, and whether it agrees with the trace."""
    if row["error"]:
        print(f"{row['custom_id']}: {row['error']['type']}: {row['error']['message']}")
        return
    message = row["response"]["body"]["choices"][0]["message"]
    calls = [call["function"]["name"] for call in message.get("tool_calls", [])]
    text = " ".join((message["content"] or "").split())
    print(f"{row['custom_id']}: {text[:60]!r} {calls} {row['whiflash']['agreement']}")


if __name__ == "__main__":
    main()
