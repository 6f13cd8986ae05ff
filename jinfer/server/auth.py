"""Authentication: API keys, compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path

from jinfer.loader.sources import SourceError
from jinfer.server.http_errors import ApiError


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Reads API keys from a file, one per line; empty lines and lines starting with # are skipped.

    Raises:
        SourceError: the file cannot be read, or has no key.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: {error}; write one key a line") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise SourceError(f"{path}: has no key; write one a line")
    return keys


def check_api_key(keys: Sequence[str], authorization: str, api_key: str) -> None:
    """Raises `ApiError` (401) if keys are required and the request has none of them.

    Args:
        authorization: value of the Authorization header, "Bearer KEY".
        api_key: value of the X-Api-Key header.
    """
    scheme, _, key = authorization.partition(" ")
    given = [key.strip() if scheme.lower() == "bearer" else "", api_key]
    # Every key is compared, so that the time does not reveal which one nearly matches.
    sent = [one.encode("latin-1", "replace") for one in given]  # headers are decoded as latin-1
    found = [hmac.compare_digest(one, known.encode()) for one in sent for known in keys]
    if keys and not any(found):
        message = "a valid API key is needed: send the header Authorization: Bearer KEY"
        headers = {"www-authenticate": "Bearer"}
        raise ApiError(401, message, code="invalid_api_key", headers=headers)
