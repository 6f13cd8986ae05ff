"""Jobs: work that the engine's thread does between two steps, such as forward passes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from jinfer.engine.engine import Engine
from jinfer.engine.requests import RequestError
from jinfer.engine.runner.forward_passes import Passes, Pause

type EngineJob = Callable[[Engine], Any]  # returns its result, or a generator that does


@dataclass
class QueuedJob:
    """A queued job; once begun, its passes can restart.

    Attributes:
        abandoned: nobody waits for its result; it ends at its next part.
    """

    job: EngineJob
    future: Future[Any] = field(default_factory=Future)
    passes: Passes[Any] | None = None
    abandoned: bool = False

    def advance(self, engine: Engine) -> Pause | None:
        """Runs its next part; None once it has a result or an exception, or is abandoned."""
        if self.abandoned:
            self.restart()
            return None
        try:
            if self.passes is None:
                result = self.job(engine)
                if not isinstance(result, Generator):
                    self.future.set_result(result)
                    return None
                self.passes = result
            return next(self.passes)
        except StopIteration as end:
            self.future.set_result(end.value)
        except BaseException as error:
            self.future.set_exception(error)
        return None

    def restart(self) -> None:
        """Frees what its passes hold; it begins again."""
        if self.passes is not None:
            self.passes.close()
            self.passes = None

    def fail(self, error: RequestError) -> None:
        """Ends it with an error."""
        self.restart()
        self.future.set_exception(error)
