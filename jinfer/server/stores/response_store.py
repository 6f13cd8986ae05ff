"""Response store: answers of /v1/responses with their conversations, in memory or in a folder.

Bounded by number, bytes and age: the oldest are removed first. A record has the whole conversation
up to its answer, so that it can be continued without earlier records.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from jinfer.server.http.http_responses import dumps

_ID = re.compile(r"resp_[0-9a-f]{32}")
UNFINISHED = ("queued", "in_progress")


@dataclass(frozen=True)
class StoredResponse:
    """A stored answer.

    Attributes:
        response: the response object.
        input: input items, including those of earlier responses.
    """

    response: dict[str, Any]
    input: list[dict[str, Any]]

    def conversation(self) -> list[dict[str, Any]]:
        """Return all items, including those of the answer."""
        return [*self.input, *self.response["output"]]


@dataclass
class ResponseStore:
    """Stored responses. Thread-safe; slow, as it reads and writes JSON: call it in a thread.

    Attributes:
        folder: folder of the responses; None: in memory.
        max_responses: maximum number of responses; 0: no storage.
        max_bytes: maximum total size.
        seconds: age at which a response is removed.
    """

    folder: Path | None = None
    max_responses: int = 1000
    max_bytes: int = 64 << 20
    seconds: float = 30 * 86400.0
    _known: dict[str, tuple[float, int]] = field(default_factory=dict)  # oldest first
    _bytes: int = 0
    _data: dict[str, bytes] = field(default_factory=dict)
    _items: dict[str, str] = field(default_factory=dict)  # output item -> its response
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        """Raise `OSError` if the folder cannot be used."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in self.folder.glob("*.tmp"):
            path.unlink(missing_ok=True)
        found = []
        for path in self.folder.glob("resp_*.json"):
            with contextlib.suppress(FileNotFoundError):
                if _ID.fullmatch(path.stem):
                    found.append((path.stat().st_mtime, path.stat().st_size, path.stem))
        for created, size, id in sorted(found):
            self._known[id] = created, size
            self._bytes += size
        self._remove_old()

    def put(self, stored: StoredResponse) -> None:
        """Store a response, replacing its earlier state."""
        id, data = (
            stored.response["id"],
            dumps({"response": stored.response, "input": stored.input}),
        )
        with self._lock:
            created, size = self._known.get(id, (time.time(), 0))
            if self.folder is None:
                self._data[id] = data
            else:
                whole = self._path(id).with_suffix(".tmp")
                whole.write_bytes(data)
                os.replace(whole, self._path(id))
            self._bytes += len(data) - size
            self._known[id] = created, len(data)
            self._items |= {item["id"]: id for item in stored.response["output"] if "id" in item}
            self._remove_old()

    def get(self, id: str) -> StoredResponse | None:
        """Return a response by its id; None if it is missing or unreadable."""
        with self._lock:
            self._remove_old()
            if id not in self._known:
                return None
            try:
                data = self._data[id] if self.folder is None else self._path(id).read_bytes()
                kept = orjson.loads(data)
                return StoredResponse(kept["response"], kept["input"])
            except (OSError, ValueError, KeyError, TypeError):
                self.delete(id)
                return None

    def item(self, id: str) -> dict[str, Any] | None:
        """Return an output item of a response stored since the start; None if missing."""
        found = self.get(self._items.get(id, ""))
        items = [] if found is None else found.response["output"]
        return next((item for item in items if item.get("id") == id), None)

    def delete(self, id: str) -> bool:
        """Remove a response; return whether it existed."""
        with self._lock:
            known = self._known.pop(id, None)
            if known is None:
                return False
            self._bytes -= known[1]
            self._data.pop(id, None)
            self._items = {item: of for item, of in self._items.items() if of != id}
            if self.folder is not None:
                self._path(id).unlink(missing_ok=True)
            return True

    def _path(self, id: str) -> Path:
        assert self.folder is not None, "there is a folder"
        return self.folder / f"{id}.json"

    def _remove_old(self) -> None:
        for id in list(self._too_many()):
            self.delete(id)

    def _too_many(self) -> Iterator[str]:
        """Yield the oldest responses beyond the limits of number, size and age."""
        oldest, left, size = time.time() - self.seconds, len(self._known), self._bytes
        for id, (created, length) in self._known.items():
            if left <= self.max_responses and size <= self.max_bytes and created >= oldest:
                return
            yield id
            left, size = left - 1, size - length
