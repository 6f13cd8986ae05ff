"""Server settings: the served models and the options of `jinfer serve`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class ServerSettings:
    """Options of the server; see `jinfer.server.flag_table`.

    Attributes:
        keys: API keys, any of which is accepted; empty: no key is needed.
        max_body: bytes of a request body.
        body_seconds: time limit for receiving a request body.
        send_seconds: time limit for a client to read a piece of its response.
        timeout: seconds that an answer may take; None: no limit.
        ping: seconds of silence after which a stream sends a comment (keep-alive).
        retry_after: the Retry-After header of refused requests, in seconds.
        max_prompts: number of prompts of one request.
        log_prompts: whether prompts and answers are logged.
        request_templates: whether a request may have its own chat template.
        strict: whether fields without effect, and names of models that are not served, are
            rejected.
        max_loaded: number of models in memory at a time; None: all models of the start, and at
            least four with models on demand.
        model_wait: seconds that a request may wait for room for its model.
        autoload: whether requests load their model.
        idle_unload, idle_sleep: seconds without requests until a model is unloaded or sleeps; None:
            never.
        warm_up: whether all programs are compiled in the background.
        cors: origins that browsers may call from (CORS); "*" for any.
        page: whether the web page at / is served.
        runtime_adapters: whether requests may load and unload LoRA adapters.
        slot_save_path: folder for saved caches of slots; None: requests must not save them.
        files_dir: folder of files and batches; None: no files API.
        max_file, max_files: bytes of an uploaded file, and of all files.
        responses_dir: folder of stored responses; None: they are kept in memory.
        max_responses: number of stored responses; 0: none is stored.
        responses_bytes: bytes of all stored responses.
        responses_seconds: age at which a stored response is removed, in seconds.
        template_variables: variables of chat templates, below those of requests.
        logits_processors: functions that requests may name.
        allow_inspection: whether requests may capture, steer and edit activations.
        inspection_bytes: bytes of activations that a request may capture, and of the steering
            vectors that are kept for a model.
        model_processes: whether models that are loaded later have their own processes.
        is_worker: whether this process is a model process.
        log: arguments of `request_log.set_up_logging` for model processes.
    """

    keys: tuple[str, ...] = ()
    max_body: int = 8 << 20
    body_seconds: float = 30.0
    send_seconds: float = 60.0
    timeout: float | None = None
    ping: float = 15.0
    retry_after: int = 1
    max_prompts: int = 2048
    log_prompts: bool = False
    request_templates: bool = False
    strict: bool = False
    max_loaded: int | None = None
    model_wait: float = 60.0
    autoload: bool = True
    idle_unload: float | None = None
    idle_sleep: float | None = None
    warm_up: bool = True
    cors: tuple[str, ...] = ()
    page: bool = True
    runtime_adapters: bool = False
    slot_save_path: str | None = None
    files_dir: str | None = None
    max_file: int = 200 << 20
    max_files: int = 4 << 30
    responses_dir: str | None = None
    max_responses: int = 1000
    responses_bytes: int = 64 << 20
    responses_seconds: float = 30 * 86400.0
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    logits_processors: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    allow_inspection: bool = False
    inspection_bytes: int = 64 << 20
    model_processes: bool = False
    is_worker: bool = False
    log: Mapping[str, Any] = field(default_factory=lambda: {"plain": True, "level": "warning"})
