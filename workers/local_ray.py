"""A quiet Ray session on this machine, and Ray itself, imported with its defaults tamed.

Modules of this floor take `ray` from here, because Ray reads some variables while it is imported.
What the user has set in the environment stands.
"""

from __future__ import annotations

import logging
import os

for _variable, _value in {
    "RAY_USAGE_STATS_ENABLED": "0",  # report nothing to anybody
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run`: no upload of the working directory
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # leave CUDA_VISIBLE_DEVICES to CPU tasks, unwarned
}.items():
    os.environ.setdefault(_variable, _value)

import ray  # noqa: E402

from whiflash_agents.engine.errors import WorkerError  # noqa: E402

# Rows are JSON and travel through the object store only when large; weights never do.
_OBJECT_STORE_BYTES = 256 * 1024**2


def start_ray(workers: int) -> bool:
    """Make sure that this process has a Ray session; True if it was started here.

    A local session takes as many CPUs as there are, or `workers` if that is more: actors are
    placed by count, their threads are set by the pool. Raises `WorkerError` if Ray cannot start.
    """
    if ray.is_initialized():
        return False
    try:
        ray.init(
            address="local",
            num_cpus=max(workers, available_cpus()),
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # Ray raises RuntimeError, OSError, ValueError, ConnectionError, ...
        raise WorkerError(
            f"Ray cannot start on this machine: {error}; decode in this process with workers 0"
        ) from error
    return True


def available_cpus() -> int:
    """CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpus_per_worker(device: str, workers: int) -> int:
    """1 if actors decode on GPUs, else 0. Raises `WorkerError` if there are too few GPUs."""
    if device not in ("auto", "cuda"):
        return 0
    known = int(ray.cluster_resources().get("GPU", 0))
    if known >= workers:
        return 1
    if known:
        raise WorkerError(
            f"{workers} workers need a GPU each, but Ray knows of {known}; lower workers to "
            f"{known}, or use device cpu"
        )
    if device == "auto":
        return 0
    raise WorkerError("device cuda was asked for, but Ray knows of no GPU; use device auto or cpu")
