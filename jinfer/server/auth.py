"""Who may ask: keys, compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path

from jinfer.opening.sources import SourceError
from jinfer.server.http_errors import ApiError


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file: one a line; empty lines and those that begin with # are none.

    Raises:
        SourceError: it cannot be read, or has no key.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: {error}; write one key a line") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise SourceError(f"{path}: has no key; write one a line")
    return keys


def check(keys: Sequence[str], authorization: str, api_key: str) -> None:
    """Raises `ApiError` where a key is needed and none of them is there.

    Args:
        authorization: the header, "Bearer KEY".
        api_key: the header X-Api-Key.
    """
    scheme, _, key = authorization.partition(" ")
    given = key.strip() if scheme.lower() == "bearer" else api_key
    # All of them are compared, so that the time says nothing of which is near.
    sent = given.encode("latin-1", "replace")  # which is how bytes of a header are read
    found = [hmac.compare_digest(sent, known.encode()) for known in keys]
    if keys and not any(found):
        message = "a valid API key is needed: send the header Authorization: Bearer KEY"
        headers = {"www-authenticate": "Bearer"}
        raise ApiError(401, message, code="invalid_api_key", headers=headers)
