"""Time, when the device has done what it was asked to do."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Seconds of a monotonic clock. On a GPU, where calls return before their work is done, it
    waits for that work: a time that does not contain it would tell nothing of a cost."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
