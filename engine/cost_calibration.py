"""The cost table of an engine, measured on the engine itself before it serves anybody.

Forwards of the target, drafts of every arm and catch-ups of every network are timed in turn, as
often as the time allows (`calibration_stage.py` runs them). Nobody's requests, prefixes or totals
are touched, and the router is not asked.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import TYPE_CHECKING, Any

import torch

from .calibration_stage import Stage
from .costs import CostTable, Curve
from .errors import SettingsError, WhiFlashError
from .target import Target

if TYPE_CHECKING:
    from .engine import WhiFlashEngine

_LONG_TOKENS = (1, 8, 32)  # tokens of the forwards behind a long context
_BACKLOGS = (1, 16, 64, 256)
_MOST_REPETITIONS = 20
_SHARE = 0.25  # of the time allowed: a call that takes more is left to extrapolation


def measure_costs(engine: WhiFlashEngine, *, seconds: float = 3.0) -> CostTable:
    """Time the parts of a round on `engine`, which must be idle and is left as it was.

    Counts are 1, 2, 4 and so on: of tokens to verify, up to what all sequences together may draft,
    and of sequences to draft for, up to those that may run. Each is measured once, and then again
    in turn while there is time; figures are medians.

    Args:
        seconds: when it should be done. A slow target takes longer to be measured once; counts
            whose call alone would take a quarter of it are left out, beyond the first two of a
            curve.

    Returns:
        the table; its `machine` says where and how it was measured: `repetitions` are the fewest
        and the most measurements of a figure, `contexts` the short and the long one in tokens.

    Raises:
        SettingsError: no time, or no free room in the KV arena.
        WhiFlashError: the engine has work.
    """
    if not seconds > 0:
        raise SettingsError(f"seconds={seconds!r}: expected a number above 0")
    if engine.has_work:
        raise WhiFlashError(
            "costs are measured on an idle engine, and this one has work "
            f"({engine.num_running} running and {engine.num_waiting} waiting requests, and events "
            "that nobody took yet): call step until has_work is false"
        )
    started = time.perf_counter()
    with Stage.on(engine) as stage:
        verify, attention, drafting, catching_up = _series(engine, stage)
        everything = [verify, attention, *drafting.values(), *catching_up.values()]
        repetitions = _measure(everything, seconds=seconds, started=started)
    slope = _slope(verify, attention)
    # Without the share of the short context; noise must not leave nothing.
    base = [
        max(verify.median(n) - slope * verify.attended(n), 0.05 * verify.median(n))
        for n in verify.counts
    ]
    return CostTable(
        verify=Curve(verify.counts, base),
        attention=slope,
        draft={arm: series.curve() for arm, series in drafting.items()},
        catch_up={network: series.curve() for network, series in catching_up.items()},
        machine=machine_of(engine.target)
        | {
            "contexts": [stage.short, stage.long],
            "repetitions": repetitions,
            "seconds": time.perf_counter() - started,
        },
    )


def machine_of(target: Target) -> dict[str, Any]:
    """The target and where it runs, as far as times depend on that."""
    return {
        "target": target.name,
        "device": str(target.device),
        "device_name": _device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next(ln.partition(":")[2].strip() for ln in lines if ln.startswith("model name"))
    except (OSError, StopIteration):  # not Linux, or a processor that does not tell
        return platform.processor() or platform.machine()


@dataclass(slots=True)
class _Series:
    """One curve to be.

    Attributes:
        run: does it once for a count and returns the seconds.
        counts: where it is measured, rising; the first pass may shorten them.
        attended: of a forward, the sum over its tokens of their context lengths.
        seconds: measurements by count.
    """

    run: Callable[[int], float]
    counts: list[int]
    attended: Callable[[int], int] = lambda count: 0
    seconds: dict[int, list[float]] = field(default_factory=dict)

    def measure(self, count: int) -> None:
        self.seconds.setdefault(count, []).append(self.run(count))

    def median(self, count: int) -> float:
        """Of two the faster one: what disturbs makes things slow."""
        return median_low(self.seconds[count])

    def curve(self) -> Curve:
        return Curve(self.counts, [self.median(count) for count in self.counts])


def _series(
    engine: WhiFlashEngine, stage: Stage
) -> tuple[_Series, _Series, dict[str, _Series], dict[str, _Series]]:
    """Verification behind short contexts and behind the long one, drafting by arm, and catching up
    by network."""
    tokens = doubling(stage.most_sequences * stage.most_tokens)
    long = [n for n in _LONG_TOKENS if n in tokens and n <= stage.most_tokens]
    if stage.long < 2 * stage.short:
        long = []  # no text here is long enough for its length to matter
    backlogs = [n for n in _BACKLOGS if n <= stage.most_backlog]
    networks = engine._catch_up.contexts
    return (
        _Series(stage.verify, tokens, stage.attended),
        _Series(stage.verify_long, long, stage.attended_long),
        {a: _Series(stage.drafting(a), doubling(stage.most_sequences)) for a in engine.drafters},
        {name: _Series(stage.catching_up(name), list(backlogs)) for name in networks},
    )


def doubling(most: int) -> list[int]:
    """1, 2, 4 and so on to `most`, which is left out when it is close to the last power of two: a
    slope between neighbours is noise, and slopes are extrapolated."""
    counts = [1 << i for i in range(most.bit_length())]
    return [*counts, most] if 2 * most >= 3 * counts[-1] else counts


def _measure(series: Sequence[_Series], *, seconds: float, started: float) -> list[int]:
    """Fill `series`; returns the fewest and the most measurements of a point."""
    for each in series:
        if each.counts:
            each.run(each.counts[0])  # what only the first call of a kind pays
    for repetition in range(_MOST_REPETITIONS):
        ran = False
        # Kinds in turn, so that a disturbance hits a point of each curve and no curve as a whole.
        for level in range(max(len(each.counts) for each in series)):
            for each in series:
                if repetition == 0 and 1 < level < len(each.counts):
                    _leave_out_slow(each, level, seconds * _SHARE)
                if level >= len(each.counts):
                    continue
                left = started + seconds - time.perf_counter()
                if repetition == 0 or each.median(each.counts[level]) < left:
                    each.measure(each.counts[level])
                    ran = True
        if not ran:
            break
    found = [len(measured) for each in series for measured in each.seconds.values()]
    return [min(found), max(found)]


def _leave_out_slow(series: _Series, level: int, most: float) -> None:
    """Drop the counts from `level` on if its call would take more than `most` seconds."""
    before, coming = series.counts[level - 1], series.counts[level]

    def is_slow() -> bool:
        return series.median(before) * coming / before > most

    if is_slow():
        series.measure(before)  # once more: a hiccup must not cut a curve
        if is_slow():
            del series.counts[level:]


def _slope(short: _Series, long: _Series) -> float:
    """Seconds per token and position of its context: what makes the squares of the relative errors
    of forwards behind the long context the least."""
    over = under = 0.0
    for count in set(long.counts) & set(short.counts):
        seconds = long.median(count)
        attended = (long.attended(count) - short.attended(count)) / seconds
        over += (1.0 - short.median(count) / seconds) * attended
        under += attended**2
    return max(0.0, over / under) if under else 0.0
