"""What Ctrl-C and SIGTERM do to a study: `bench`, `calibrate`, `train router`.

What can end with something to show for it ends after the turn at hand; the rest ends at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

_ENDING = b"\nwhiflash-batch: interrupted; ending after the turn at hand (again to abort)\n"


class Stoppable(Protocol):
    """What can end early with something to show."""

    def stop(self) -> bool:
        """End after the turn at hand; False if there is none."""


@dataclass(slots=True)
class Interrupts:
    """The signal that came last, None if none did; and what it is to end gently."""

    signal: int | None = None
    running: Stoppable | None = None

    @property
    def status(self) -> int:
        """Of the process, as shells name it: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (signal.SIGINT if self.signal is None else self.signal)


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """The first SIGINT or SIGTERM ends `running` after the turn at hand. Where nothing can be ended
    so, and the second time, it raises KeyboardInterrupt; a third one kills."""
    received = Interrupts()

    def handle(number: int, frame: Any) -> None:
        again, received.signal = received.signal is not None, number
        if again:
            signal.signal(number, signal.SIG_DFL)
        if again or received.running is None or not received.running.stop():
            raise KeyboardInterrupt
        os.write(2, _ENDING)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
