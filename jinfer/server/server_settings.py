"""What an operator decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Source:
    """A model to be served.

    Attributes:
        name: what requests call it.
        path: as `LLM` takes it.
        overrides: keys of its specification.
    """

    name: str
    path: str
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """How the service behaves; `jinfer.server.serve_flags` says what each is for.

    Attributes:
        keys: any of them opens the service; none: it is open.
        max_body: bytes of a request.
        body_seconds: that a request's body may take to come.
        send_seconds: that a client may take to read a piece of its answer.
        timeout: seconds that an answer may take; None: any time.
        ping: seconds of silence after which a stream gets a comment.
        retry_after: seconds after which whoever was refused should come again.
        most_prompts: of one request.
        log_prompts: whether texts of requests and answers are logged.
        request_templates: whether a request may bring a chat template along.
        strict: whether fields that change nothing, and names of models that are not served, are
            refused.
        max_loaded: models in memory at a time; None: all.
        warm_up: whether all programs are made in the background.
        cors: origins that browsers may call from; "*" for any.
        page: whether there is a page at /.
    """

    keys: tuple[str, ...] = ()
    max_body: int = 8 << 20
    body_seconds: float = 30.0
    send_seconds: float = 60.0
    timeout: float | None = None
    ping: float = 15.0
    retry_after: int = 1
    most_prompts: int = 2048
    log_prompts: bool = False
    request_templates: bool = False
    strict: bool = False
    max_loaded: int | None = None
    warm_up: bool = True
    cors: tuple[str, ...] = ()
    page: bool = True
