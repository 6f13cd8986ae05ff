"""Stores of a server: folders (or memory) for files, batches and responses, as its flags say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinfer.loader.sources import SourceError
from jinfer.server.batch_store import BatchStore
from jinfer.server.file_store import FileStore
from jinfer.server.response_store import ResponseStore
from jinfer.server.server_settings import ServerSettings


def open_stores(settings: ServerSettings) -> dict[str, Any]:
    """The stores, as fields of `Service`.

    Raises:
        SourceError: a folder that cannot be used, or that another server uses.
    """
    responses = settings.responses_dir
    try:
        stores: dict[str, Any] = {
            "responses": ResponseStore(
                None if responses is None else Path(responses),
                settings.max_responses,
                settings.responses_bytes,
                settings.responses_seconds,
            )
        }
    except OSError as error:
        raise SourceError(f"--responses-dir {responses}: {error}") from None
    if settings.files_dir is not None:
        try:
            stores["files"] = FileStore(Path(settings.files_dir), settings.max_files)
            stores["batches"] = BatchStore(stores["files"])
        except OSError as error:
            raise SourceError(f"--files-dir {settings.files_dir}: {error}") from None
    return stores
