"""Server flags: the table, the command line and the environment variables of `jinfer serve`."""

# ruff: noqa: RUF009 (`option` gives a `dataclasses.field`)

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from jinfer.cli.prog_name import prog_of_module
from jinfer.cli.terminal.argument_parser import PREFIX, CliParser, add_flags, flags_of
from jinfer.cli.terminal.generate_flags import JOB_FLAGS, ModelFlags
from jinfer.loader.config.source_errors import SourceError
from jinfer.modelspec.bounded_types import (
    Bounds,
    Count,
    NotNegative,
    Reader,
    Size,
    WrongValue,
    option,
)
from jinfer.modelspec.foreign_names import flag_hint
from jinfer.modelspec.model_spec import Reasoning, ToolCalls
from jinfer.modelspec.spec_files import parse_override
from jinfer.modelspec.toml_tables import merge, nested
from jinfer.server.http.server_settings import ModelSource, Seconds, ServerSettings


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


_NAMED = re.compile(r"([\w.-]+)=([\w.]+):([\w.]+)")


def named_functions(texts: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """Import functions by their names in requests.

    Modules may be in the current folder.

    Args:
        texts: NAME=MODULE:FUNCTION.

    Raises:
        SourceError: a function cannot be imported, or a name occurs twice.
    """
    found: dict[str, Callable[..., Any]] = {}
    for text in texts:
        if (match := _NAMED.fullmatch(text)) is None:
            raise SourceError(f"--logits-processor {text[:200]}: write NAME=MODULE:FUNCTION")
        if match[1] in found:
            raise SourceError(f"--logits-processor {match[1]}: the name occurs twice")
        found[match[1]] = _function(text, match[2], match[3])
    return found


def _function(text: str, module: str, path: str) -> Callable[..., Any]:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        value: Any = import_module(module)
        for name in path.split("."):
            value = getattr(value, name)
    except Exception as error:  # importing runs the module's code
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise SourceError(f"--logits-processor {text[:200]}: {reason}") from error
    if not callable(value):
        raise SourceError(
            f"--logits-processor {text[:200]}: {type(value).__name__} is not a function"
        )
    return value


_SHORT = (
    *("--host", "--port", "--alias", "--ctx-size", "--parallel", "--set", "--api-key"),
    *("--warm-up", "--log-format", "--help"),
)
_ALIAS = re.compile(r"([\w.:-]+)=(.+)", re.DOTALL)


def make_parser() -> argparse.ArgumentParser:
    """Create the argument parser; absent flags are absent from its result."""
    made = CliParser(
        prog=prog_of_module("jinfer.serve"),
        usage="%(prog)s [SOURCE...] [flags]",
        description="Serves models over HTTP. Each flag may come from the environment: --port "
        "from JINFER_PORT, --api-key from JINFER_API_KEY (several with commas), and so on; "
        "JINFER_SOURCE has sources. The command line wins.",
        argument_default=argparse.SUPPRESS,
        short=_SHORT,
        instead=lambda flag: flag_hint(flag, serve=True),
    )
    made.add_argument(
        "source",
        nargs="*",
        help="a spec (.toml), a checkpoint folder or file, package://..., hf://...; NAME=SOURCE "
        "gives it a name",
    )
    add_flags(made, FLAGS, negatable=True)
    return made


def parse_options(
    arguments: Sequence[str] | None, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Parse the flags of the command line, and of the environment.

    Raises:
        SourceError: an invalid environment variable.
    """
    parsed = vars(make_parser().parse_args(arguments))
    found: dict[str, Any] = {flag.name: flag.default for flag in FLAGS}
    for flag in FLAGS:
        if (text := environment.get(flag.variable)) is not None:
            try:
                found[flag.name] = flag.read_variable(text)
            except WrongValue as wrong:
                reason = f"{flag.variable}={text!r} is not {wrong.expected}{wrong.hint}"
                raise SourceError(reason) from None
    if not parsed.get("source"):
        listed = environment.get(f"{PREFIX}SOURCE", "")
        parsed["source"] = [text for text in re.split(r"[\n,]", listed) if text.strip()]
    return {**found, **parsed}


def server_settings_of(flags: Mapping[str, Any]) -> ServerSettings:
    """Create the server's settings. Raises `SourceError` for unreadable keys or functions."""
    keys = tuple(flags["api_key"])
    if flags["api_key_file"]:
        keys += read_api_keys(Path(flags["api_key_file"]))
    own = {flag.name: flags[flag.name] for flag in flags_of(ServerSettings)}
    own |= {name: tuple(own[name]) for name in ("cors", "image_hosts")}
    return ServerSettings(
        keys=keys,
        warm_up=flags["warm_up"] == "background",
        model_processes=flags["model_processes"],
        logits_processors=named_functions(flags["logits_processor"]),
        **own,
    )


def model_sources_of(flags: Mapping[str, Any]) -> list[ModelSource]:
    """List the models of the command line.

    Raises:
        SourceError: there is no model, folder or file of models; or a duplicate name.
        SpecError: an invalid override.
    """
    named = [*([flags["model"]] if flags["model"] else []), *flags["source"]]
    if not named and not flags["models_dir"] and not flags["models"]:
        raise SourceError(
            "there is no SOURCE; write a spec, a checkpoint, package://... or hf://..., or "
            "--models-dir FOLDER"
        )
    overrides = overrides_of(flags)
    sources = [_source(text, overrides) for text in named]
    if called := [text.strip() for text in (flags["alias"] or "").split(",") if text.strip()]:
        if not sources:
            raise SourceError("--alias names the first SOURCE, but there is no SOURCE")
        sources[0] = ModelSource(called[0], sources[0].path, overrides, tuple(called[1:]))
    names = [name for source in sources for name in (source.name, *source.aliases)]
    for name in names:
        if names.count(name) > 1:
            raise SourceError(f"two models are called {name}; name them: other={sources[0].path}")
    return sources


def overrides_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides of all models. Raises `SourceError` and `SpecError`."""
    overrides: dict[str, Any] = {"engine": {"queue": flags["queue"]}}
    for text in flags["set"]:
        overrides = merge(overrides, parse_override(text))
    for flag in FLAGS:
        if flag.key and flags[flag.name] not in (None, ""):
            overrides = merge(overrides, nested(flag.key, flags[flag.name]))
    for text in flags["adapter"]:
        if (named := _ALIAS.fullmatch(text)) is None:
            raise SourceError(f"--adapter {text[:200]}: write NAME=SOURCE")
        overrides = merge(overrides, {"adapters": {named[1]: named[2]}})
    if flags["warm_up"] == "before":
        overrides = merge(overrides, {"engine": {"warm_up": True}})
    if flags["chat_template"]:
        overrides = merge(overrides, {"prompt": {"chat_template": _template(flags)}})
    return overrides


def _template(flags: Mapping[str, Any]) -> str:
    """Return a chat template, or the content of a file."""
    text = flags["chat_template"]
    if "{" in text:
        return text
    try:
        return Path(text).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"--chat-template {text[:200]}: {error}") from None


def _source(text: str, overrides: Mapping[str, Any]) -> ModelSource:
    """Read a model given as NAME=SOURCE or SOURCE."""
    named = _ALIAS.fullmatch(text)
    if named is not None and not Path(text).exists():
        return ModelSource(named[1], named[2], overrides)
    return ModelSource(default_model_name(text), text, overrides)


def default_model_name(source: str) -> str:
    """Return the default name of a source: its file without the suffix, or its folder."""
    if source.startswith("hf://"):
        return source.removeprefix("hf://")
    path = PurePath(source.partition("://")[2] or source)
    name = Path(source).resolve().name if path.name in ("", "..", ".") else path.name
    for ending in (".toml", ".gguf", ".bin", ".safetensors"):
        name = name.removesuffix(ending)
    return name


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Read API keys from a file, one per line; empty lines and lines starting with # are skipped.

    Raises:
        SourceError: the file cannot be read, or has no key.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: {error}; write a key per line") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise SourceError(f"{path}: has no key; write a key per line")
    return keys
