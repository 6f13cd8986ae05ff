"""Tracing: OpenTelemetry spans, if its package is installed."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any


@cache
def _tracer() -> Any:
    """The tracer of the application's provider; None without the package."""
    if importlib.util.find_spec("opentelemetry") is None:
        return None
    from opentelemetry import trace

    return trace.get_tracer("jinfer")


@contextlib.contextmanager
def span(name: str, headers: Mapping[str, str], notes: dict[str, Any]) -> Iterator[None]:
    """A span of a request, a child of the one in its headers (traceparent).

    Args:
        notes: attributes set at the end; only numbers and strings are recorded.
    """
    tracer = _tracer()
    if tracer is None:
        yield
        return
    from opentelemetry import propagate, trace

    context = propagate.extract(headers)
    kind = trace.SpanKind.SERVER
    with tracer.start_as_current_span(name, context=context, kind=kind) as current:
        yield
        for key, value in notes.items():
            if isinstance(value, str | int | float | bool):
                current.set_attribute(f"jinfer.{key}", value)
