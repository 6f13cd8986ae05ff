"""Keep-alive: how long a request of Ollama's API lets its model stay in memory afterwards."""

from __future__ import annotations

import math
import re

from jinfer.server.http_errors import invalid_request

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(rf"(-?)((?:{_PART.pattern})+)")
_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?")


def keep_alive_seconds(value: str | float) -> float:
    """Seconds of a `keep_alive`: a number, or a duration such as "5m" or "1h30m"; negative: inf.

    Raises:
        ApiError: it is neither.
    """
    seconds = _seconds(value)
    if seconds is None or math.isnan(seconds):
        told = f"{str(value)[:80]!r} is not a number of seconds, nor a duration such as 5m or 1h30m"
        raise invalid_request(told, "keep_alive")
    return math.inf if seconds < 0 else seconds


def _seconds(value: str | float) -> float | None:
    if not isinstance(value, str):
        return float(value)
    if _NUMBER.fullmatch(value):
        return float(value)
    if (found := _DURATION.fullmatch(value)) is None:
        return None
    total = sum(float(count) * _UNITS[unit] for count, unit in _PART.findall(found[2]))
    return -1.0 if found[1] and total else total
