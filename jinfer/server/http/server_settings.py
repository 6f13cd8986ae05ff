"""Server settings: the served models and the options of `jinfer serve`."""

# ruff: noqa: RUF009 (`option` gives a `dataclasses.field`)

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from jinfer.modelspec.bounded_types import Count, NotNegative, Reader, Size, WrongValue, option

# Variables of chat templates that `Conversation.encode` sets itself; "special" would parse special
# tokens in messages.
RESERVED_VARIABLES = frozenset(
    {
        *("messages", "tokenizer", "special", "tools", "documents"),
        *("add_generation_prompt", "continue_final_message"),
    }
)


@dataclass(frozen=True)
class ModelSource:
    """A model to serve.

    Attributes:
        name: the name that requests use.
        path: a source as `LLM` takes it.
        overrides: keys of its specification.
        aliases: other names of it.
        on_demand: it is loaded by the first request for it, rather than when the server starts.
        pinned: it does not leave memory by itself.
        idle_unload: seconds without requests after which it leaves; None: as the server says.
    """

    name: str
    path: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    on_demand: bool = False
    pinned: bool = False
    idle_unload: float | None = None


def _read_seconds(value: Any) -> float | None:
    if not 0 <= value < math.inf:
        raise WrongValue("a number of seconds from 0 on", value)
    return value or None


def _parse_object(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _read_variables(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WrongValue("a JSON object", value)
    if reserved := sorted(RESERVED_VARIABLES & value.keys()):
        raise WrongValue(f"without {reserved[0]}, which each request sets", value)
    return value


# Seconds; 0 is no limit, which is None.
Seconds = Annotated[
    float | None, Reader(_read_seconds, "a number of seconds from 0 on", float, metavar="S")
]
Variables = Annotated[
    Mapping[str, Any], Reader(_read_variables, "a JSON object", _parse_object, metavar="JSON")
]


@dataclass(frozen=True)
class ServerSettings:
    """Options of the server; fields of `option` have a flag of `jinfer serve`.

    Attributes:
        keys: API keys, any of which is accepted; empty: no key is needed.
        max_body: bytes of a request body, at most.
        body_seconds: seconds that a client may take to send a request body.
        send_seconds: seconds that a client may take to read a piece of its response.
        timeout: seconds that an answer may take; 0: any time.
        ping: seconds of silence after which a stream sends a comment (keep-alive).
        retry_after: the Retry-After header of refused requests, in seconds.
        max_prompts: prompts of one request, at most.
        log_prompts: log prompts and answers, too.
        request_templates: requests may have chat templates of their own.
        strict: refuse fields without effect, and unknown models.
        max_loaded: models in memory at a time; the least recently used is unloaded. By default all
            that are loaded at the start, and four where models are loaded on demand.
        model_wait: seconds that a request may wait until its model fits into memory; 0: none.
        autoload: a request loads the model that it names.
        idle_unload: seconds without requests after which a model is unloaded.
        idle_sleep: seconds without requests after which a model sleeps, without its weights and
            cache.
        warm_up: whether all programs are compiled in the background.
        cors: an origin that browsers may call from (CORS); * for any.
        page: serve a page at / to chat and to see what the engine does.
        runtime_adapters: requests may load and unload LoRA adapters.
        slot_save_path: a folder in which requests may save the KV cache of a slot.
        files_dir: a folder for files and batches (/v1/files, /v1/batches).
        max_file: bytes of an uploaded file, at most.
        max_files: bytes of all files, at most.
        responses_dir: a folder for stored responses; without it they are kept in memory.
        max_responses: stored responses, the oldest of which is removed; 0: none is stored.
        responses_bytes: bytes of all stored responses, at most.
        responses_seconds: age at which a stored response is removed.
        template_variables: variables of chat templates, as JSON; those of requests override them.
        logits_processors: functions that requests may name.
        allow_inspection: requests may capture, steer and edit activations.
        inspection_bytes: bytes of activations that a request may capture, and of the steering
            vectors that are kept for a model.
        model_processes: whether models that are loaded beside others have processes of their own.
        is_worker: whether this is such a process.
        log: arguments of `request_log.set_up_logging` for such processes.
    """

    keys: tuple[str, ...] = ()
    max_body: Size = option(8 << 20)
    body_seconds: NotNegative = option(30.0, flag="--body-timeout")
    send_seconds: NotNegative = option(60.0, flag="--send-timeout")
    timeout: Seconds = option(None)
    ping: NotNegative = option(15.0)
    retry_after: int = 1
    max_prompts: Size = option(2048)
    log_prompts: bool = option(False)
    request_templates: bool = option(False, flag="--request-chat-templates")
    strict: bool = option(False)
    max_loaded: Size | None = option(None)
    model_wait: NotNegative = option(60.0)
    autoload: bool = option(True, flag="--models-autoload")
    idle_unload: Seconds = option(None)
    idle_sleep: Seconds = option(None)
    warm_up: bool = True
    cors: tuple[str, ...] = option((), metavar="ORIGIN")
    page: bool = option(True)
    runtime_adapters: bool = option(False)
    slot_save_path: str | None = option(None, metavar="FOLDER")
    files_dir: str | None = option(None, metavar="FOLDER")
    max_file: Size = option(200 << 20)
    max_files: Size = option(4 << 30)
    responses_dir: str | None = option(None, metavar="FOLDER")
    max_responses: Count = option(1000)
    responses_bytes: Size = option(64 << 20)
    responses_seconds: NotNegative = option(30 * 86400.0)
    template_variables: Variables = option(factory=dict, flag="--chat-template-kwargs")
    logits_processors: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    allow_inspection: bool = option(False)
    inspection_bytes: Count = option(64 << 20)
    model_processes: bool = False
    is_worker: bool = False
    log: Mapping[str, Any] = field(default_factory=lambda: {"plain": True, "level": "warning"})
