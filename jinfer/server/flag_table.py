"""Flag table: the flags of `jinfer serve`, with their help, types and defaults."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from jinfer.distributed import job_config
from jinfer.modelspec.prompt_formats import Reasoning, ToolCalls
from jinfer.server.http.server_settings import RESERVED_VARIABLES, ServerSettings

PREFIX = "JINFER_"


@dataclass(frozen=True)
class ServeFlag:
    """A command-line flag.

    Attributes:
        names: names on the command line; the environment variable uses the first long name.
        help: help text of a single line.
        kind: converts a text; bool: a switch; list: may be repeated.
        default: the default value.
        choices: the allowed values.
    """

    names: tuple[str, ...]
    help: str
    kind: Any = str
    default: Any = None
    choices: tuple[str, ...] | None = None

    @property
    def key(self) -> str:
        """The key in the parsed options."""
        long = next(name for name in self.names if name.startswith("--"))
        return long.removeprefix("--").replace("-", "_")

    @property
    def variable(self) -> str:
        """The name of the environment variable."""
        return PREFIX + self.key.upper()


def seconds(text: str) -> float | None:
    """Read seconds, from 0 on; None for 0. Raises `ArgumentTypeError`."""
    value = _number(float, text, "a number of seconds")
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 on")
    return value or None


def count(text: str, minimum: int = 1) -> int:
    """Read an integer, from `minimum` on. Raises `ArgumentTypeError`."""
    value = _number(int, text, "a whole number")
    if value < minimum:
        raise argparse.ArgumentTypeError(f"{text} is below {minimum}")
    return value


def size(text: str) -> int:
    """Read an integer, from 0 on. Raises `ArgumentTypeError`."""
    return count(text, minimum=0)


def gib(text: str) -> float:
    """Read a number of GiB, from 0 on. Raises `ArgumentTypeError`."""
    value = _number(float, text, "a number of GiB")
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 on")
    return value


def port(text: str) -> int:
    """Read a port number. Raises `ArgumentTypeError`."""
    value = _number(int, text, "a whole number")
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 65535")
    return value


def _number[T](kind: Callable[[str], T], text: str, what: str) -> T:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None


def budget(text: str) -> int | None:
    """Read a number of tokens; -1: None."""
    value = count(text, minimum=-1)
    return None if value == -1 else value


def template_variables(text: str) -> dict[str, Any]:
    """Read the variables of a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not a JSON object")
    if reserved := sorted(RESERVED_VARIABLES & value.keys()):
        raise argparse.ArgumentTypeError(f"{reserved[0]} is set by each request")
    return value


# Aliases are the names of llama-server and vLLM.
FLAGS: tuple[ServeFlag, ...] = (
    ServeFlag(("--host",), "address to listen on; several with commas", default="127.0.0.1"),
    ServeFlag(("--port",), "port to listen on; 0: any free port", port, 8080),
    ServeFlag(("--uds",), "path of a Unix socket to listen on instead"),
    ServeFlag(
        ("--alias", "-a", "--served-model-name"),
        "names of the first model in requests; several with commas",
    ),
    ServeFlag(("--model", "-m"), "a SOURCE, as llama-server names it"),
    ServeFlag(("--set",), "KEY=VALUE: any key of the specification, of all models", list),
    ServeFlag(
        ("--ctx-size", "-c", "--max-model-len"),
        "maximum tokens of a sequence (engine.context)",
        count,
    ),
    ServeFlag(
        ("--parallel", "-np", "--max-num-seqs"),
        "maximum number of concurrent sequences (engine.slots)",
        count,
    ),
    ServeFlag(
        ("--kv-cache", "-ctk", "-ctv", "--cache-type-k", "--cache-type-v", "--kv-cache-dtype"),
        "number format of the KV cache (quantization.kv_cache)",
    ),
    ServeFlag(("--dtype",), "number format of weights and computation"),
    ServeFlag(("--chat-template",), "a Jinja template, or a file with a template"),
    ServeFlag(
        ("--chat-template-kwargs", "--default-chat-template-kwargs"),
        "default variables of chat templates, as JSON",
        template_variables,
    ),
    ServeFlag(
        ("--reasoning-budget",),
        "maximum tokens of thought (generation.thinking_token_budget); 0: none, -1: no limit",
        budget,
    ),
    ServeFlag(
        ("--reasoning-budget-message",),
        "last words of a thought at its budget (generation.thinking_budget_message)",
    ),
    ServeFlag(
        ("--tool-call-parser",),
        "format of tool calls (prompt.tool_calls): " + ", ".join(get_args(ToolCalls)),
    ),
    ServeFlag(
        ("--reasoning-parser",),
        "format of thoughts (prompt.reasoning): " + ", ".join(get_args(Reasoning)),
    ),
    *(ServeFlag((f"--{name}",), about) for name, about in job_config.FLAGS.items()),
    ServeFlag(
        ("--cache-ram",),
        "GiB of host memory for offloaded prefixes (engine.cache_ram)",
        gib,
    ),
    ServeFlag(
        ("--cache-disk",),
        "folder for offloaded prefixes, which outlive a restart (engine.cache_disk)",
    ),
    ServeFlag(("--cache-disk-size",), "maximum GiB in that folder (engine.cache_disk_size)", gib),
    ServeFlag(("--slot-save-path",), "folder in which requests may save the caches of slots"),
    ServeFlag(("--queue",), "maximum number of waiting requests; others get status 429", size, 256),
    ServeFlag(
        ("--models-dir",),
        "folder of GGUF files, checkpoints and specifications to load on demand",
    ),
    ServeFlag(("--models",), "TOML file of models to load on demand, with settings"),
    ServeFlag(
        ("--models-autoload",),
        "requests load their model",
        bool,
        ServerSettings.autoload,
    ),
    ServeFlag(
        ("--model-processes",),
        "on a CPU, models that are loaded later have their own processes",
        bool,
        True,
    ),
    ServeFlag(
        ("--max-loaded", "--models-max"),
        "maximum number of models in memory; the least recently used is unloaded",
        count,
    ),
    ServeFlag(
        ("--model-wait",),
        "seconds that a request waits for its model to be loaded; 0: none",
        float,
        ServerSettings.model_wait,
    ),
    ServeFlag(("--idle-unload",), "seconds without requests until a model is unloaded", seconds),
    ServeFlag(
        ("--idle-sleep", "--sleep-idle-seconds"),
        "seconds without requests until a model sleeps: weights and KV cache are freed",
        seconds,
    ),
    ServeFlag(
        ("--warm-up",),
        "compile all programs: in the background, before the first request, or when needed",
        default="background",
        choices=("background", "before", "off"),
    ),
    ServeFlag(("--api-key",), "an API key", list),
    ServeFlag(("--api-key-file",), "file of API keys, a key per line"),
    ServeFlag(("--cors",), "an origin that browsers may call from (CORS); * for any", list),
    ServeFlag(
        ("--page",),
        "serve a web page at / with a chat and the engine's state",
        bool,
        ServerSettings.page,
    ),
    ServeFlag(("--max-body",), "maximum bytes of a request body", count, ServerSettings.max_body),
    ServeFlag(
        ("--max-prompts",),
        "maximum number of prompts in a request",
        count,
        ServerSettings.max_prompts,
    ),
    ServeFlag(
        ("--body-timeout",),
        "time limit for receiving a body, in seconds",
        float,
        ServerSettings.body_seconds,
    ),
    ServeFlag(
        ("--send-timeout",),
        "time limit for a client to read a piece, in seconds",
        float,
        ServerSettings.send_seconds,
    ),
    ServeFlag(("--timeout",), "time limit of an answer, in seconds; 0: none", seconds, None),
    ServeFlag(
        ("--stop-timeout",),
        "time limit of running answers after SIGTERM, in seconds; 0: none",
        seconds,
        30.0,
    ),
    ServeFlag(
        ("--ping",), "seconds of silence until a stream sends a comment", float, ServerSettings.ping
    ),
    ServeFlag(
        ("--adapter", "--lora-modules"),
        "NAME=SOURCE: a LoRA adapter, which requests use as model name",
        list,
    ),
    ServeFlag(
        ("--max-adapters", "--max-loras"),
        "maximum number of loaded LoRA adapters (engine.max_adapters)",
        size,
    ),
    ServeFlag(
        ("--max-adapter-rank", "--max-lora-rank"),
        "maximum rank of LoRA adapters (engine.max_adapter_rank)",
        count,
    ),
    ServeFlag(
        ("--logits-processor",),
        "NAME=MODULE:FUNCTION: a logits processor for requests",
        list,
    ),
    ServeFlag(("--runtime-adapters",), "allow requests to load and unload LoRA adapters", bool),
    ServeFlag(("--files-dir",), "folder of files and batches (/v1/files, /v1/batches)"),
    ServeFlag(("--max-file",), "maximum bytes of an uploaded file", count, ServerSettings.max_file),
    ServeFlag(("--max-files",), "maximum bytes of all files", count, ServerSettings.max_files),
    ServeFlag(("--responses-dir",), "folder of stored responses; default: in memory"),
    ServeFlag(
        ("--max-responses",),
        "maximum number of stored responses; 0: none",
        size,
        ServerSettings.max_responses,
    ),
    ServeFlag(
        ("--responses-bytes",),
        "maximum bytes of all stored responses",
        count,
        ServerSettings.responses_bytes,
    ),
    ServeFlag(
        ("--responses-seconds",),
        "age at which a stored response is removed, in seconds",
        float,
        ServerSettings.responses_seconds,
    ),
    ServeFlag(
        ("--allow-inspection",), "allow requests to capture, steer and edit activations", bool
    ),
    ServeFlag(
        ("--inspection-bytes",),
        "maximum bytes of captured activations of a request, and of stored steering vectors",
        size,
        ServerSettings.inspection_bytes,
    ),
    ServeFlag(("--request-chat-templates",), "allow chat templates in requests", bool),
    ServeFlag(("--strict",), "reject fields without effect, and unknown models", bool),
    ServeFlag(("--log-prompts",), "log prompts and answers", bool),
    ServeFlag(
        ("--log-format",),
        "JSON lines or text; auto: text on a terminal",
        default="auto",
        choices=("auto", "json", "text"),
    ),
    ServeFlag(
        ("--log-level",),
        "lowest level to log",
        default="info",
        choices=("debug", "info", "warning", "error"),
    ),
    ServeFlag(("--ssl-certfile", "--ssl-cert-file"), "TLS certificate"),
    ServeFlag(("--ssl-keyfile", "--ssl-key-file"), "key of the TLS certificate"),
    ServeFlag(("--ssl-ca-certs",), "certificates that must have signed the clients' certificates"),
)
