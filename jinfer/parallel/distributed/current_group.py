"""Current process group: the job that this process has joined, if any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jinfer.loader.config.source_errors import SourceError

if TYPE_CHECKING:
    from jinfer.parallel.distributed.process_group import ProcessGroup

_current: ProcessGroup | None = None


def current_group() -> ProcessGroup | None:
    """The job that this process has joined, if any."""
    return _current


def refuse_on_worker() -> None:
    """Raises `SourceError` on a worker: only rank 0 may open a model by itself."""
    if _current is not None and _current.rank:
        raise SourceError(
            f"process {_current.rank} of {_current.size} follows process 0, which has the model; "
            "call jinfer.api.job_processes.run_worker here"
        )


def set_current_group(group: ProcessGroup | None) -> None:
    """Sets the job that this process belongs to."""
    global _current
    _current = group
