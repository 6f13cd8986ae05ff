"""Spans for OpenTelemetry, where its package is."""

import contextlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from jinfer.server.http import middleware


class Span:
    """What a tracer gives."""

    def __init__(self, name: str, context: Any) -> None:
        self.name, self.context = name, context
        self.attributes: dict[str, Any] = {}

    def set_attribute(self, key: str, value: Any) -> None:
        self.attributes[key] = value


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Span]]:
    """The spans of a stand-in for the package, of as much of it as is used."""
    found: list[Span] = []

    @contextlib.contextmanager
    def begun(name: str, context: Any, kind: Any) -> Iterator[Span]:
        found.append(Span(name, context))
        yield found[-1]

    package = types.ModuleType("opentelemetry")
    package.__spec__ = importlib.machinery.ModuleSpec("opentelemetry", None)
    package.trace = types.SimpleNamespace(  # type: ignore[attr-defined]
        get_tracer=lambda name: types.SimpleNamespace(start_as_current_span=begun),
        SpanKind=types.SimpleNamespace(SERVER="server"),
    )
    package.propagate = types.SimpleNamespace(  # type: ignore[attr-defined]
        extract=lambda headers: headers["traceparent"]
    )
    monkeypatch.setitem(sys.modules, "opentelemetry", package)
    middleware._tracer.cache_clear()
    yield found
    middleware._tracer.cache_clear()


def test_a_span_has_what_is_known_at_its_end(spans: list[Span]) -> None:
    notes: dict[str, Any] = {}
    with middleware.span("POST /", {"traceparent": "00-abc"}, notes):
        notes |= {"status": 200, "model": "m", "metadata": {"a": "b"}}
    (span,) = spans
    assert (span.name, span.context) == ("POST /", "00-abc")
    assert span.attributes == {"jinfer.status": 200, "jinfer.model": "m"}


def test_without_the_package_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "_tracer", lambda: None)
    with middleware.span("POST /", {}, {}):
        pass
