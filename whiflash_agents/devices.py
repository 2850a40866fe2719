"""Which device and number format `auto` means on this machine."""

from __future__ import annotations

from whiflash_agents.engine.errors import WorkerError


def pick_device(device: str, dtype: str) -> tuple[str, str]:
    """Resolve the settings `device` and `dtype`.

    Raises:
        WorkerError: a GPU was asked for and torch finds none.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device.startswith("cuda") and not torch.cuda.is_available():
        raise WorkerError(
            f"device {device!r} was asked for, but torch {torch.__version__} finds no usable GPU; "
            "use device auto or cpu"
        )
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    return device, dtype
