"""Batch store: batches of requests and their results, in the folder of the files.

A batch is `batches/ID.json`, rewritten at each change of its status; results are appended as lines
to `ID.output` and `ID.errors`. A killed server loses only requests in flight, and continues after
the last complete line.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import orjson

from jinfer.server.http.http_errors import ApiError
from jinfer.server.stores.file_store import FileStore, write_whole

_ID = re.compile(r"batch_[0-9a-f]{32}")
MAX_BATCHES = 1000
ENDED = ("completed", "failed", "expired", "cancelled")
_TIMES = (
    *("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"),
)
Outcome = Literal["completed", "expired", "cancelled"]


@dataclass
class BatchStore:
    """The batches of a folder. Used by the event loop alone.

    Attributes:
        files: the folder's files.
        batches: OpenAI's batch objects, oldest first; keys with a leading "_" are private.
        changed: set when a batch changes.
    """

    files: FileStore
    batches: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Raise `OSError` if the folder cannot be used."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = []
        for path in self.folder.glob("batch_*.json"):
            with contextlib.suppress(OSError, ValueError):
                if _ID.fullmatch(path.stem):
                    found.append(orjson.loads(path.read_bytes()))
        found.sort(key=lambda batch: batch["created_at"])
        self.batches = {item["id"]: item for item in found}

    @property
    def folder(self) -> Path:
        """The folder of the batches."""
        return self.files.folder / "batches"

    def create(self, fields: dict[str, Any], seconds: int) -> dict[str, Any]:
        """Add a batch. Raises `ApiError` if there are too many.

        Args:
            fields: endpoint, input_file_id, completion_window, metadata.
            seconds: seconds until it expires.
        """
        ended = [batch["id"] for batch in self.batches.values() if batch["status"] in ENDED]
        for id in ended[: max(0, len(self.batches) + 1 - MAX_BATCHES)]:
            del self.batches[id]
            (self.folder / f"{id}.json").unlink(missing_ok=True)
        if len(self.batches) >= MAX_BATCHES:
            message = f"{MAX_BATCHES} batches are unfinished; try again later"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "60"})
        now = int(time.time())
        batch = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "errors": None,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + seconds,
            **{f"{name}_at": None for name in _TIMES},
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            **fields,
        }
        self.batches[batch["id"]] = batch
        self.save(batch)
        return batch

    def move(self, batch: dict[str, Any], status: str, **more: Any) -> None:
        """Change a batch's status."""
        batch |= {"status": status, f"{status}_at": int(time.time()), **more}
        self.save(batch)

    def save(self, batch: dict[str, Any]) -> None:
        """Write a batch, and set `changed`."""
        write_whole(self.folder / f"{batch['id']}.json", orjson.dumps(batch))
        self.changed.set()

    def next(self) -> dict[str, Any] | None:
        """Return the oldest unfinished batch."""
        return next(
            (batch for batch in self.batches.values() if batch["status"] not in ENDED), None
        )

    def reader_of(self, file: str) -> str | None:
        """Return the id of an unfinished batch that reads a file."""
        return next(
            (
                batch["id"]
                for batch in self.batches.values()
                if batch["input_file_id"] == file and batch["status"] not in ENDED
            ),
            None,
        )

    def results(self, batch: dict[str, Any]) -> BatchResults:
        """Open the results of a batch. Slow."""
        return BatchResults(*self.result_paths(batch))

    def result_paths(self, batch: dict[str, Any]) -> tuple[Path, Path]:
        """Return the paths of the results and the errors."""
        return self.folder / f"{batch['id']}.output", self.folder / f"{batch['id']}.errors"


def shown(batch: dict[str, Any]) -> dict[str, Any]:
    """Return OpenAI's batch object."""
    return {name: value for name, value in batch.items() if not name.startswith("_")}


class BatchResults:
    """The written results of a batch. Thread-safe.

    Attributes:
        completed, failed: custom ids of lines with an answer, and with an error.
    """

    def __init__(self, output: Path, errors: Path) -> None:
        """Read existing results, without an incomplete last line."""
        self.completed, self.failed = _known(output), _known(errors)
        self._files: dict[bool, BinaryIO] = {
            False: output.open("ab"),
            True: errors.open("ab"),
        }
        self._lock = threading.Lock()

    def write(self, custom_id: str, line: dict[str, Any], *, failed: bool) -> None:
        """Append a line."""
        with self._lock:
            self._files[failed].write(orjson.dumps(line) + b"\n")
            self._files[failed].flush()
            (self.failed if failed else self.completed).add(custom_id)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def _known(path: Path) -> set[str]:
    """Return the custom ids of a file's complete lines; truncate the rest."""
    if not path.exists():
        return set()
    known, end = set(), 0
    with path.open("r+b") as file:
        for line in file:
            try:
                known.add(orjson.loads(line)["custom_id"])
            except (ValueError, KeyError, TypeError):
                break
            if not line.endswith(b"\n"):
                break
            end += len(line)
        file.truncate(end)
    return known
