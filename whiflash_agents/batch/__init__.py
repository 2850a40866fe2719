"""What a run is: its rows, their order, the output rows, the figures."""

from .figures import RunFigures
from .local import LocalRunner
from .plan import Row
from .progress import Progress
from .rows import generated_part
from .run import WhiFlashBatch
from .runner import Runner
from .session import EngineSession
from .session_spec import SessionSpec

__all__ = [
    "EngineSession",
    "LocalRunner",
    "Progress",
    "Row",
    "RunFigures",
    "Runner",
    "SessionSpec",
    "WhiFlashBatch",
    "generated_part",
]
