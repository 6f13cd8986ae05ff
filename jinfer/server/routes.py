"""The table of routes."""

from __future__ import annotations

from jinfer.server import about
from jinfer.server.chat import chat
from jinfer.server.completions import completions
from jinfer.server.endpoint import Endpoint
from jinfer.server.replies import EVENTS
from jinfer.server.schemas.chat import ChatAnswer, ChatRequest
from jinfer.server.schemas.completions import CompletionAnswer, CompletionRequest

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "GET", ("/health", "/v1/health", "/ping"), about.health, "Whether requests are answered",
        public=True,
    ),
    Endpoint("GET", ("/version",), about.show_version, "Which jinfer this is"),
    Endpoint(
        "GET", ("/metrics",), about.metrics, "Figures for Prometheus", media_type="text/plain"
    ),
    Endpoint("GET", ("/v1/models", "/models"), about.models, "What is served"),
    Endpoint("GET", ("/v1/models/{model:path}",), about.model, "One of the models"),
    Endpoint(
        "POST",
        ("/v1/chat/completions", "/chat/completions"),
        chat,
        "Answers a conversation",
        ChatRequest,
        ChatAnswer,
        EVENTS,
    ),
    Endpoint(
        "POST",
        ("/v1/completions", "/completions"),
        completions,
        "Continues texts",
        CompletionRequest,
        CompletionAnswer,
        EVENTS,
    ),
)  # fmt: skip
