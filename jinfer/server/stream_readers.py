"""Server-sent events that several clients read while they grow: the readers' waiting."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from jinfer.server.http_responses import SSE_PING


@dataclass
class StreamReaders:
    """Those who wait for more of a stream."""

    _more: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        """There is more, or nothing more comes."""
        self._more.set()
        self._more = asyncio.Event()

    async def wait(self) -> None:
        """Returns at the next `wake`."""
        await self._more.wait()

    async def wait_or_ping(self, ping: float) -> bytes:
        """Returns nothing at the next `wake`, or a comment after `ping` seconds of silence."""
        try:
            async with asyncio.timeout(ping):
                await self.wait()
        except TimeoutError:
            return SSE_PING
        return b""
