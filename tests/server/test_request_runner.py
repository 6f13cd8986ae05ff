"""What is known of an answer while its stream goes on."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from jinfer.engine.output.completion import Chunk, Usage
from jinfer.server.core.prompt_requests import PromptRequests
from jinfer.server.core.request_runner import RequestRunner
from jinfer.server.http.metrics import RequestTimer
from jinfer.server.tool_parsers.output_deltas import PLAIN_TEXT


class ForgetfulEngine:
    """It ends a request with its first chunk, as of short answers, and its usage comes late."""

    def __init__(self) -> None:
        self.thread, self.known = self, True
        self.sink: Callable[[Any], None] = print

    def submit(self, prepared: Any, sink: Callable[[Any], None]) -> None:
        self.sink = sink

    def when_received(self, received: Callable[[], None]) -> None:
        received()
        self.sink(Chunk("!", (7,), finish_reason="length"))
        self.known = False

    def progress(self, id: int) -> tuple[int, int] | None:
        return (32, 33) if self.known else None


def test_cached_tokens_of_a_request_that_has_ended() -> None:
    engine: Any = ForgetfulEngine()
    request = SimpleNamespace(id=3, prompt=[5] * 33, deadline=None)
    options: Any = SimpleNamespace(progress=False, nothing=False)
    prepared: Any = SimpleNamespace(request=request)
    job = PromptRequests([5] * 33, options, [prepared], PLAIN_TEXT)
    run = RequestRunner(engine, [job], RequestTimer(MagicMock(), "tiny"), 1, 60.0)

    async def shown() -> list[int]:
        found = []
        async for batch in run.chunks():
            if batch:
                found.append(run.shown_usage(0).cached_tokens)
                engine.sink(Usage(33, 1, 0.0, 0.0, cached_tokens=32))
        return found

    assert asyncio.run(shown()) == [32]
