"""Flag table: the flags of `jinfer serve`, with their types, defaults and documentation."""

# ruff: noqa: RUF009 (`option` gives a `dataclasses.field`)

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from jinfer.cli.terminal.argument_parser import flags_of
from jinfer.cli.terminal.generate_flags import JOB_FLAGS, ModelFlags
from jinfer.modelspec.bounded_types import (
    Bounds,
    Count,
    NotNegative,
    Reader,
    Size,
    WrongValue,
    option,
)
from jinfer.modelspec.prompt_formats import Reasoning, ToolCalls
from jinfer.server.http.server_settings import Seconds, ServerSettings


def _read_budget(value: Any) -> int | None:
    if value < -1:
        raise WrongValue("a whole number from -1 on", value)
    return None if value == -1 else value


Budget = Annotated[int | None, Reader(_read_budget, "a whole number from -1 on", int, metavar="N")]


@dataclass(frozen=True)
class ServeFlags(ModelFlags):
    """Flags of `jinfer serve` besides those of `ServerSettings`.

    Attributes:
        host: address to listen at; several with commas.
        port: port to listen at; 0: any that is free.
        uds: path of a unix socket to listen at instead.
        alias: the name of the first model in requests; several with commas.
        parallel: sequences that run at a time (engine.slots).
        chat_template: a Jinja template, or a file with one.
        reasoning_budget: tokens of thought, at most (generation.thinking_token_budget); 0: none,
            -1: any number.
        reasoning_budget_message: the last text of a thought that reaches its budget
            (generation.thinking_budget_message).
        tool_call_parser: how models write tool calls (prompt.tool_calls).
        reasoning_parser: how models mark their thoughts (prompt.reasoning).
        cache_ram: GiB of host memory for prefixes that the cache has no room for
            (engine.cache_ram).
        cache_disk: a folder for cached prefixes, which outlive a restart (engine.cache_disk).
        cache_disk_size: GiB that it may have (engine.cache_disk_size).
        queue: requests that may wait; further requests are answered with 429.
        models_dir: a folder whose GGUF files, checkpoint folders and specifications are loaded on
            demand.
        models: a TOML file of models that are loaded on demand, with settings of each.
        model_processes: on a CPU, models that are loaded beside others have processes of their own.
        warm_up: when all programs are compiled: in the background, before the first request, or as
            they are needed.
        api_key: a key that requests may use.
        api_key_file: a file of keys, a line each.
        stop_timeout: seconds that running answers may take after SIGTERM; 0: any time.
        adapter: a LoRA adapter, which requests name as their model.
        max_adapters: LoRA adapters that may be loaded at a time (engine.max_adapters).
        max_adapter_rank: their highest rank (engine.max_adapter_rank).
        logits_processor: a logits processor that requests may name.
        log_format: lines of JSON, or text for a person; auto: text on a terminal.
        log_level: the least severe messages that are logged.
        ssl_certfile: certificate, for TLS.
        ssl_keyfile: its key.
        ssl_ca_certs: certificates of the authorities that sign clients' certificates.
    """

    host: str = option("127.0.0.1")
    port: Annotated[int, Bounds(0, 65535)] = option(8080)
    uds: str | None = option(metavar="PATH")
    alias: str | None = option(metavar="NAME")
    parallel: Size | None = option(key="engine.slots")
    chat_template: str | None = option(metavar="FILE|TEXT")
    reasoning_budget: Budget = option(key="generation.thinking_token_budget")
    reasoning_budget_message: str | None = option(key="generation.thinking_budget_message")
    tool_call_parser: ToolCalls | None = option(key="prompt.tool_calls", metavar="NAME")
    reasoning_parser: Reasoning | None = option(key="prompt.reasoning", metavar="NAME")
    cache_ram: NotNegative | None = option(key="engine.cache_ram")
    cache_disk: str | None = option(key="engine.cache_disk", metavar="FOLDER")
    cache_disk_size: NotNegative | None = option(key="engine.cache_disk_size")
    queue: Count = option(256)
    models_dir: str | None = option(metavar="FOLDER")
    models: str | None = option(metavar="FILE")
    model_processes: bool = option(True)
    warm_up: Literal["background", "before", "off"] = option("background")
    api_key: tuple[str, ...] = option((), metavar="KEY")
    api_key_file: str | None = option(metavar="FILE")
    stop_timeout: Seconds = option(30.0)
    adapter: tuple[str, ...] = option((), metavar="NAME=SOURCE")
    max_adapters: Count | None = option(key="engine.max_adapters")
    max_adapter_rank: Size | None = option(key="engine.max_adapter_rank")
    logits_processor: tuple[str, ...] = option((), metavar="NAME=MODULE:FUNCTION")
    log_format: Literal["auto", "json", "text"] = option("auto")
    log_level: Literal["debug", "info", "warning", "error"] = option("info")
    ssl_certfile: str | None = option(metavar="FILE")
    ssl_keyfile: str | None = option(metavar="FILE")
    ssl_ca_certs: str | None = option(metavar="FILE")


FLAGS = (*flags_of(ServeFlags, ServerSettings), *JOB_FLAGS)
