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
        aliases: other names.
        on_demand: whether the first request loads the model, rather than the server's start.
        pinned: whether the model always stays in memory.
        idle_unload: seconds without requests until it is unloaded; None: the server's setting.
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
        raise WrongValue(f"a JSON object without {reserved[0]}, which each request sets", value)
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
        max_body: maximum bytes of a request body.
        body_seconds: time limit for receiving a body, in seconds.
        send_seconds: time limit for a client to read a piece, in seconds.
        timeout: time limit of an answer, in seconds; 0: none.
        ping: seconds of silence until a stream sends a comment.
        retry_after: the Retry-After header of refused requests, in seconds.
        max_prompts: maximum number of prompts in a request.
        limit_images: maximum number of images in a prompt.
        image_hosts: a host from which images are downloaded, as HOST or HOST:PORT; no others are.
        image_folder: folder whose images requests may name by file: URLs.
        log_prompts: log prompts and answers.
        request_templates: allow requests to have their own chat templates.
        strict: reject fields without effect, and names of models that are not served.
        max_loaded: maximum number of models in memory; the least recently used is unloaded;
            default: all models of the start, and at least four with models on demand.
        model_wait: seconds that a request waits for its model to be loaded; 0: none.
        autoload: requests load their model.
        idle_unload: seconds without requests until a model is unloaded.
        idle_sleep: seconds without requests until a model sleeps: weights and KV cache are freed.
        warm_up: whether all programs are compiled in the background.
        cors: an origin that browsers may call from (CORS); * for any.
        page: serve a web page at / with a chat and the engine's state.
        runtime_adapters: allow requests to load and unload LoRA adapters.
        slot_save_path: folder in which requests may save the caches of slots.
        files_dir: folder of files and batches (/v1/files, /v1/batches).
        max_file: maximum bytes of an uploaded file.
        max_files: maximum bytes of all files.
        responses_dir: folder of stored responses; default: in memory.
        max_responses: maximum number of stored responses; 0: none.
        responses_bytes: maximum bytes of all stored responses.
        responses_seconds: age at which a stored response is removed, in seconds.
        template_variables: default variables of chat templates, as JSON.
        logits_processors: functions that requests may name.
        allow_inspection: allow requests to capture, steer and edit activations.
        inspection_bytes: bytes of activations that a request may capture, and of the steering
            vectors that are kept for a model.
        model_processes: whether models that are loaded later have their own processes.
        is_worker: whether this process is a model process.
        log: arguments of `request_log.set_up_logging` for model processes.
    """

    keys: tuple[str, ...] = ()
    max_body: Size = option(8 << 20)
    body_seconds: NotNegative = option(30.0, flag="--body-timeout")
    send_seconds: NotNegative = option(60.0, flag="--send-timeout")
    timeout: Seconds = option(None)
    ping: NotNegative = option(15.0)
    retry_after: int = 1
    max_prompts: Size = option(2048)
    limit_images: Count = option(32)
    image_hosts: tuple[str, ...] = option((), metavar="HOST")
    image_folder: str | None = option(None, metavar="FOLDER")
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
