"""Static files of the web page, and their HTTP headers (Content-Security-Policy, ETag)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinfer.server.http_errors import ApiError
from jinfer.server.http_responses import HttpResponse
from jinfer.server.service import RequestContext

_FOLDER = Path(__file__).with_name("assets")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Content-Security-Policy: only the page's own files are run or fetched, because generated text may
# contain anything.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS: Mapping[str, str] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class StaticFile:
    """A static file.

    Attributes:
        content: the bytes.
        media_type: the media type.
        tag: the ETag, which changes with the content.
    """

    content: bytes
    media_type: str
    tag: str


async def index(call: RequestContext[Any]) -> HttpResponse:
    """Serves the page."""
    return _sent(call, "index.html")


async def asset(call: RequestContext[Any]) -> HttpResponse:
    """Serves a file of the page."""
    return _sent(call, call.request.path_params["file"])


@cache
def files() -> Mapping[str, StaticFile]:
    """All static files by name."""
    return {path.name: _read(path) for path in _FOLDER.iterdir() if path.suffix in _TYPES}


def _read(path: Path) -> StaticFile:
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return StaticFile(content, _TYPES[path.suffix], tag)


def _sent(call: RequestContext[Any], name: str) -> HttpResponse:
    """Sends a file, or 304 if the browser's copy is current. Raises `ApiError` if there is none."""
    file = files().get(name)
    if file is None:
        raise ApiError(404, f"the page has no file {name[:200]!r}")
    headers = {**_HEADERS, "etag": file.tag}
    if file.tag in call.request.headers.get("if-none-match", ""):
        return HttpResponse(b"", 304, headers, file.media_type)
    return HttpResponse(file.content, 200, headers, file.media_type)
