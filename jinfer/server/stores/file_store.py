"""File store: files of clients and of batches, in a folder that outlives a server.

A file's content is `files/ID.data`, its metadata `files/ID.json`. Both are written under another
name first, so that a killed server leaves no partial file.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
from filelock import FileLock, Timeout

from jinfer.server.http.http_errors import ApiError

_ID = re.compile(r"file-[0-9a-f]{32}")
MAX_FILES = 10_000


@dataclass(frozen=True)
class StoredFile:
    """A file.

    Attributes:
        id: the file's id.
        bytes: its size.
        created_at, expires_at: seconds since 1970; None: never expires.
        filename: the client's file name.
        purpose: OpenAI's purpose of the file.
    """

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        return {**asdict(self), "object": "file", "status": "processed"}


def write_whole(path: Path, data: bytes) -> None:
    """Write a file in one step: a reader sees the old content or the new one."""
    half = path.with_name(f"{path.name}.tmp")
    half.write_bytes(data)
    os.replace(half, path)


def new_file_id() -> str:
    """Return a new file id."""
    return f"file-{uuid.uuid4().hex}"


@dataclass
class FileStore:
    """A folder of files, used by a single server at a time.

    Attributes:
        folder: folder of files and batches.
        max_bytes: maximum total size.
    """

    folder: Path
    max_bytes: int
    _files: dict[str, StoredFile] = field(default_factory=dict)  # the oldest first

    def __post_init__(self) -> None:
        """Raise `OSError` if the folder cannot be used, or another server uses it."""
        self.files.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = FileLock(self.folder / "lock", thread_local=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise OSError(f"{self.folder}: another server uses it") from None
        found = []
        for path in self.files.iterdir():
            file = _read(path) if path.suffix == ".json" and _ID.fullmatch(path.stem) else None
            if file is not None and self.path(file.id).is_file():
                found.append(file)
            elif path.suffix != ".data":
                path.unlink(missing_ok=True)
        self._files = {item.id: item for item in sorted(found, key=lambda file: file.created_at)}
        for path in self.files.glob("*.data"):
            if path.stem not in self._files:
                path.unlink(missing_ok=True)

    @property
    def files(self) -> Path:
        """The folder of the files themselves."""
        return self.folder / "files"

    def close(self) -> None:
        """Release the folder for another server."""
        self._lock.release()

    def path(self, id: str) -> Path:
        """Return the path of a file's content."""
        return self.files / f"{id}.data"

    def half(self) -> Path:
        """Return a path for a file that is being written."""
        return self.files / f"{uuid.uuid4().hex}.part"

    def room(self) -> int:
        """Return the free bytes. Raises `ApiError` if there are too many files."""
        self.remove_expired()
        if len(self._files) >= MAX_FILES:
            raise ApiError(
                400, f"there are {MAX_FILES} files already; delete some", code="storage_full"
            )
        return self.max_bytes - sum(file.bytes for file in self._files.values())

    def add(
        self, path: Path, filename: str, purpose: str, seconds: int | None, id: str | None = None
    ) -> StoredFile:
        """Add a written file.

        Args:
            path: the written file, in this folder.
            seconds: seconds until it expires; None: never.
            id: its id; None: a new one.
        """
        now = int(time.time())
        expires = None if seconds is None else now + seconds
        size = path.stat().st_size
        file = StoredFile(id or new_file_id(), size, now, filename[:255], purpose, expires)
        # In this order, a server killed in between keeps the file under its old name.
        write_whole(self._about(file.id), orjson.dumps(asdict(file)))
        os.replace(path, self.path(file.id))
        self._files[file.id] = file
        return file

    def get(self, id: str) -> StoredFile | None:
        """Return a file by its id; None if there is no such file."""
        self.remove_expired()
        return self._files.get(id)

    def listed(self) -> list[StoredFile]:
        """List all files, oldest first."""
        self.remove_expired()
        return list(self._files.values())

    def delete(self, id: str) -> None:
        """Remove a file."""
        self._files.pop(id, None)
        for path in (self._about(id), self.path(id)):
            path.unlink(missing_ok=True)

    def remove_expired(self) -> None:
        """Remove expired files."""
        now = time.time()
        for file in list(self._files.values()):
            if file.expires_at is not None and file.expires_at <= now:
                self.delete(file.id)

    def _about(self, id: str) -> Path:
        return self.files / f"{id}.json"


def _read(path: Path) -> StoredFile | None:
    """Read the metadata of a file; None if damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return StoredFile(**orjson.loads(path.read_bytes()))
    return None
