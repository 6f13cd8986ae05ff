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
from jinfer.modelspec.model_spec import Reasoning, ToolCalls
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
        host: address to listen on; several with commas.
        port: port to listen on; 0: any free port.
        uds: path of a Unix socket to listen on instead.
        alias: names of the first model in requests; several with commas.
        parallel: maximum number of concurrent sequences (engine.slots).
        chat_template: a Jinja template, or a file with a template.
        reasoning_budget: maximum tokens of thought (generation.thinking_token_budget); 0: none, -1:
            no limit.
        reasoning_budget_message: last words of a thought at its budget
            (generation.thinking_budget_message).
        tool_call_parser: format of tool calls (prompt.tool_calls).
        reasoning_parser: format of thoughts (prompt.reasoning).
        cache_ram: GiB of host memory for offloaded prefixes (engine.cache_ram).
        cache_disk: folder for offloaded prefixes, which outlive a restart (engine.cache_disk).
        cache_disk_size: maximum GiB in that folder (engine.cache_disk_size).
        queue: maximum number of waiting requests; others get status 429.
        models_dir: folder of GGUF files, checkpoints and specifications to load on demand.
        models: TOML file of models to load on demand, with settings.
        model_processes: on a CPU, models that are loaded later have their own processes.
        warm_up: compile all programs: in the background, before the first request, or when needed.
        api_key: an API key.
        api_key_file: file of API keys, a key per line.
        stop_timeout: time limit of running answers after SIGTERM, in seconds; 0: none.
        adapter: a LoRA adapter, which requests use as model name.
        max_adapters: maximum number of loaded LoRA adapters (engine.max_adapters).
        max_adapter_rank: maximum rank of LoRA adapters (engine.max_adapter_rank).
        logits_processor: a logits processor for requests.
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
