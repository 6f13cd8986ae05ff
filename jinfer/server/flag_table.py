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
        names: as on the command line; the environment variable is named after the first long one.
        help: one line.
        kind: converts a text; bool: a switch; list: may be repeated.
        default: the value if it is not given.
        choices: the allowed values.
    """

    names: tuple[str, ...]
    help: str
    kind: Any = str
    default: Any = None
    choices: tuple[str, ...] | None = None

    @property
    def key(self) -> str:
        """Its key among the parsed options."""
        long = next(name for name in self.names if name.startswith("--"))
        return long.removeprefix("--").replace("-", "_")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.key.upper()


def seconds(text: str) -> float | None:
    """Seconds, from 0 on; None for 0. Raises `ArgumentTypeError`."""
    value = _number(float, text, "a number of seconds")
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 on")
    return value or None


def count(text: str, minimum: int = 1) -> int:
    """A whole number, from `least` on. Raises `ArgumentTypeError`."""
    value = _number(int, text, "a whole number")
    if value < minimum:
        raise argparse.ArgumentTypeError(f"{text} is below {minimum}")
    return value


def size(text: str) -> int:
    """A whole number, from 0 on. Raises `ArgumentTypeError`."""
    return count(text, minimum=0)


def gib(text: str) -> float:
    """A number of GiB, from 0 on. Raises `ArgumentTypeError`."""
    value = _number(float, text, "a number of GiB")
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 on")
    return value


def port(text: str) -> int:
    """A port's number. Raises `ArgumentTypeError`."""
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
    """A number of tokens; -1: None."""
    value = count(text, minimum=-1)
    return None if value == -1 else value


def template_variables(text: str) -> dict[str, Any]:
    """The variables of a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not a JSON object")
    if reserved := sorted(RESERVED_VARIABLES & value.keys()):
        raise argparse.ArgumentTypeError(f"{reserved[0]} is set by each request")
    return value


# The names of llama-server and vLLM are accepted as aliases.
FLAGS: tuple[ServeFlag, ...] = (
    ServeFlag(("--host",), "address to listen at; several with commas", default="127.0.0.1"),
    ServeFlag(("--port",), "port to listen at; 0: any that is free", port, 8080),
    ServeFlag(("--uds",), "path of a unix socket to listen at instead"),
    ServeFlag(
        ("--alias", "-a", "--served-model-name"),
        "what requests call the first model; several with commas",
    ),
    ServeFlag(("--model", "-m"), "a SOURCE, as llama-server names it"),
    ServeFlag(("--set",), "KEY=VALUE: any key of the specification, of all models", list),
    ServeFlag(
        ("--ctx-size", "-c", "--max-model-len"),
        "tokens that a sequence may have (engine.context)",
        count,
    ),
    ServeFlag(
        ("--parallel", "-np", "--max-num-seqs"),
        "sequences that run at a time (engine.slots)",
        count,
    ),
    ServeFlag(
        ("--kv-cache", "-ctk", "-ctv", "--cache-type-k", "--cache-type-v", "--kv-cache-dtype"),
        "what numbers of the cache are kept as (quantization.kv_cache)",
    ),
    ServeFlag(("--dtype",), "of weights and computation"),
    ServeFlag(("--chat-template",), "a Jinja template, or a file with one"),
    ServeFlag(
        ("--chat-template-kwargs", "--default-chat-template-kwargs"),
        "variables of chat templates, as JSON, below those of requests",
        template_variables,
    ),
    ServeFlag(
        ("--reasoning-budget",),
        "tokens of thought, at most (generation.thinking_token_budget); 0: none, -1: any number",
        budget,
    ),
    ServeFlag(
        ("--reasoning-budget-message",),
        "what a thought that is at its budget says last (generation.thinking_budget_message)",
    ),
    ServeFlag(
        ("--tool-call-parser",),
        "how models write calls of tools (prompt.tool_calls): " + ", ".join(get_args(ToolCalls)),
    ),
    ServeFlag(
        ("--reasoning-parser",),
        "how models mark their thoughts (prompt.reasoning): " + ", ".join(get_args(Reasoning)),
    ),
    *(ServeFlag((f"--{name}",), about) for name, about in job_config.FLAGS.items()),
    ServeFlag(
        ("--cache-ram",),
        "GiB of host memory for prefixes that the cache has no room for (engine.cache_ram)",
        gib,
    ),
    ServeFlag(
        ("--cache-disk",),
        "a folder for cached prefixes, which outlive a restart (engine.cache_disk)",
    ),
    ServeFlag(("--cache-disk-size",), "GiB that may be in it (engine.cache_disk_size)", gib),
    ServeFlag(
        ("--slot-save-path",), "a folder in which requests may save what is cached of a slot"
    ),
    ServeFlag(("--queue",), "requests that may wait; more are answered with 429", size, 256),
    ServeFlag(
        ("--models-dir",),
        "a folder whose GGUF files, checkpoint folders and specifications are loaded on demand",
    ),
    ServeFlag(
        ("--models",), "a TOML file of models that are loaded on demand, with settings of each"
    ),
    ServeFlag(
        ("--models-autoload",),
        "a request loads the model that it names",
        bool,
        ServerSettings.autoload,
    ),
    ServeFlag(
        ("--model-processes",),
        "on a CPU, models that are loaded beside others have processes of their own",
        bool,
        True,
    ),
    ServeFlag(
        ("--max-loaded", "--models-max"),
        "models in memory at a time; the least recently used leaves",
        count,
    ),
    ServeFlag(
        ("--model-wait",),
        "seconds that a request may wait for room for its model; 0: none",
        float,
        ServerSettings.model_wait,
    ),
    ServeFlag(("--idle-unload",), "seconds without requests after which a model leaves", seconds),
    ServeFlag(
        ("--idle-sleep", "--sleep-idle-seconds"),
        "seconds without requests after which a model sleeps: its weights and cache leave",
        seconds,
    ),
    ServeFlag(
        ("--warm-up",),
        "make all programs: in the background, before the first request, or as they are needed",
        default="background",
        choices=("background", "before", "off"),
    ),
    ServeFlag(("--api-key",), "a key that opens the service", list),
    ServeFlag(("--api-key-file",), "a file of keys, one a line"),
    ServeFlag(("--cors",), "an origin that browsers may call from; * for any", list),
    ServeFlag(
        ("--page",),
        "a page at / to chat and to see what the engine does",
        bool,
        ServerSettings.page,
    ),
    ServeFlag(("--max-body",), "bytes of a request, at most", count, ServerSettings.max_body),
    ServeFlag(
        ("--max-prompts",), "prompts of one request, at most", count, ServerSettings.max_prompts
    ),
    ServeFlag(
        ("--body-timeout",),
        "seconds that a body may take to come",
        float,
        ServerSettings.body_seconds,
    ),
    ServeFlag(
        ("--send-timeout",),
        "seconds that a client may take to read a piece",
        float,
        ServerSettings.send_seconds,
    ),
    ServeFlag(("--timeout",), "seconds that an answer may take; 0: any time", seconds, None),
    ServeFlag(
        ("--stop-timeout",),
        "seconds that running answers may take after SIGTERM; 0: any time",
        seconds,
        30.0,
    ),
    ServeFlag(
        ("--ping",), "seconds of silence until a stream has a comment", float, ServerSettings.ping
    ),
    ServeFlag(
        ("--adapter", "--lora-modules"),
        "NAME=SOURCE: a LoRA adapter, which requests name as their model",
        list,
    ),
    ServeFlag(
        ("--max-adapters", "--max-loras"),
        "LoRA adapters that may be loaded at a time (engine.max_adapters)",
        size,
    ),
    ServeFlag(
        ("--max-adapter-rank", "--max-lora-rank"),
        "the highest rank that they may have (engine.max_adapter_rank)",
        count,
    ),
    ServeFlag(
        ("--logits-processor",),
        "NAME=MODULE:FUNCTION: a logits processor that requests may name",
        list,
    ),
    ServeFlag(("--runtime-adapters",), "requests may load and unload LoRA adapters", bool),
    ServeFlag(("--files-dir",), "a folder for files and batches (/v1/files, /v1/batches)"),
    ServeFlag(
        ("--max-file",), "bytes of an uploaded file, at most", count, ServerSettings.max_file
    ),
    ServeFlag(("--max-files",), "bytes of all files, at most", count, ServerSettings.max_files),
    ServeFlag(("--responses-dir",), "a folder for stored responses; without one: in memory"),
    ServeFlag(
        ("--max-responses",),
        "stored responses; the oldest leaves; 0: none is stored",
        size,
        ServerSettings.max_responses,
    ),
    ServeFlag(
        ("--responses-bytes",),
        "bytes of all stored responses, at most",
        count,
        ServerSettings.responses_bytes,
    ),
    ServeFlag(
        ("--responses-seconds",),
        "age at which a stored response is removed",
        float,
        ServerSettings.responses_seconds,
    ),
    ServeFlag(("--allow-inspection",), "requests may capture, steer and edit activations", bool),
    ServeFlag(
        ("--inspection-bytes",),
        "bytes of activations that a request may capture, and of steering vectors that are kept",
        size,
        ServerSettings.inspection_bytes,
    ),
    ServeFlag(("--request-chat-templates",), "requests may bring chat templates along", bool),
    ServeFlag(("--strict",), "refuse fields that would change nothing, and unknown models", bool),
    ServeFlag(("--log-prompts",), "log what requests say, too", bool),
    ServeFlag(
        ("--log-format",),
        "lines of JSON, or for a person; auto: text on a terminal",
        default="auto",
        choices=("auto", "json", "text"),
    ),
    ServeFlag(
        ("--log-level",),
        "what is logged",
        default="info",
        choices=("debug", "info", "warning", "error"),
    ),
    ServeFlag(("--ssl-certfile", "--ssl-cert-file"), "certificate, for TLS"),
    ServeFlag(("--ssl-keyfile", "--ssl-key-file"), "its key"),
    ServeFlag(("--ssl-ca-certs",), "certificates that clients have to be signed by"),
)
