"""How much memory there is, and how many KV positions that makes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from .kv_cache import PlaneShape


def arena_positions(
    planes: Sequence[PlaneShape], dtype: torch.dtype, device: torch.device, *, wanted: int
) -> int:
    """Positions of an arena of `planes`: what is wanted, within a quarter of the free memory on a
    CPU and four fifths of it on a GPU."""
    if device.type == "cuda":
        memory = int(torch.cuda.mem_get_info(device)[0] * 0.8)
    else:
        memory = _free_memory() // 4
    each = sum(plane.bytes_per_position(dtype) for plane in planes)
    return max(64, min(wanted, memory // each))


def device_memory(device: torch.device) -> int | None:
    """Physical memory of the device in bytes, in use or not; None where it is not told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def size_text(size: int) -> str:
    """A number of bytes in the largest unit that it has one of: `1.50 GiB`, `24.0 MiB`."""
    if size >= 2**30:
        return f"{size / 2**30:,.2f} GiB"
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def _free_memory() -> int:
    """Available physical memory in bytes; 8 GiB where the system does not tell."""
    try:
        # Unlike SC_AVPHYS_PAGES this counts the page cache, which a model just read has filled.
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(ln.split()[1]) for ln in lines if ln.startswith("MemAvailable:")) << 10
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 8 << 30
