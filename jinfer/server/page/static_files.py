"""Static files of the web page, and their HTTP headers (Content-Security-Policy, ETag)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from jinfer.server.core.endpoint import Routes
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_errors import ApiError
from jinfer.server.http.http_responses import HttpResponse

PAGE_TAG = "page"
routes = Routes(tag=PAGE_TAG, public=True)

# The page's own files, and the libraries that they load on demand.
_FOLDERS = (Path(__file__).with_name("assets"), Path(__file__).with_name("vendor"))
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
# Content-Security-Policy: only the page's own files are run or fetched, because generated text may
# contain anything.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "worker-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types colour-worker",
    )
)
_HEADERS: Mapping[str, str] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


@routes.add("GET /", media_type="text/html")
async def index(request: RequestContext[Any]) -> HttpResponse:
    """The web page."""
    return _sent(request, "index.html")


@routes.add("GET /page/{file}", media_type="*/*")
async def asset(request: RequestContext[Any]) -> HttpResponse:
    """A file of the web page."""
    return _sent(request, request.http.path_params["file"])


@cache
def files() -> Mapping[str, HttpResponse]:
    """Return the responses with the static files, by name; their ETags depend on the content."""
    paths = (path for folder in _FOLDERS for path in folder.iterdir())
    return {path.name: _read(path) for path in paths if path.suffix in _TYPES}


def _read(path: Path) -> HttpResponse:
    content = path.read_bytes()
    headers = {**_HEADERS, "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
    return HttpResponse(content, 200, headers, _TYPES[path.suffix])


def _sent(request: RequestContext[Any], name: str) -> HttpResponse:
    """Return a file, or 304 if the browser's copy is current. Raises `ApiError`."""
    file = files().get(name)
    if file is None:
        raise ApiError(404, f"the page has no file {name[:200]!r}")
    if file.headers["etag"] in request.http.headers.get("if-none-match", ""):
        return replace(file, content=b"", status=304)
    return file
