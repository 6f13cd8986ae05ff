"""Server flags: the command line and environment variables of `jinfer serve`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any

from jinfer.cli.prog_name import prog_of_module
from jinfer.cli.terminal.argument_parser import CliParser
from jinfer.cli.terminal.foreign_flags import SERVER_FLAG_HINTS
from jinfer.loader.config.config_json import SourceError
from jinfer.modelspec.spec_files import parse_override
from jinfer.modelspec.toml_tables import merge, nested
from jinfer.server.flag_table import FLAGS, PREFIX, ServeFlag
from jinfer.server.http.server_settings import ModelSource, ServerSettings

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
        instead=SERVER_FLAG_HINTS,
    )
    made.add_argument(
        "source",
        nargs="*",
        help="a spec (.toml), a checkpoint folder or file, package://..., hf://...; NAME=SOURCE "
        "gives it a name",
    )
    for flag in FLAGS:
        more: dict[str, Any] = {"help": flag.help, "dest": flag.key}
        if flag.kind is bool:
            more["action"] = argparse.BooleanOptionalAction
        elif flag.kind is list:
            more |= {"action": "append", "metavar": flag.key.upper()}
        else:
            kind = flag.kind
            more |= {"type": kind, "choices": flag.choices, "metavar": flag.key.upper()}
            if flag.choices:
                more["metavar"] = "|".join(flag.choices)
        made.add_argument(*flag.names, **more)
    return made


def parse_options(
    arguments: Sequence[str] | None, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Parse the flags of the command line, and of the environment.

    Raises:
        SourceError: an invalid environment variable.
    """
    parsed = vars(make_parser().parse_args(arguments))
    found: dict[str, Any] = {flag.key: [] if flag.kind is list else flag.default for flag in FLAGS}
    for flag in FLAGS:
        if flag.variable in environment:
            found[flag.key] = _value(flag, environment[flag.variable])
    if not parsed.get("source"):
        listed = environment.get(f"{PREFIX}SOURCE", "")
        parsed["source"] = [text for text in re.split(r"[\n,]", listed) if text.strip()]
    return {**found, **parsed}


def _value(flag: ServeFlag, text: str) -> Any:
    where = f"{flag.variable}={text!r}"
    if flag.kind is bool:
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in words:
            raise SourceError(f"{where}: write true or false")
        return words[text.lower()]
    if flag.kind is list:
        return [item.strip() for item in text.split(",") if item.strip()]
    if flag.choices and text not in flag.choices:
        raise SourceError(f"{where}: allowed: {', '.join(flag.choices)}")
    try:
        return flag.kind(text)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise SourceError(f"{where}: {error}") from None


def server_settings_of(flags: Mapping[str, Any]) -> ServerSettings:
    """Create the server's settings. Raises `SourceError` for unreadable keys or functions."""
    keys = tuple(flags["api_key"])
    if flags["api_key_file"]:
        keys += read_api_keys(Path(flags["api_key_file"]))
    return ServerSettings(
        keys=keys,
        max_body=flags["max_body"],
        body_seconds=flags["body_timeout"],
        send_seconds=flags["send_timeout"],
        timeout=flags["timeout"],
        ping=flags["ping"],
        max_prompts=flags["max_prompts"],
        log_prompts=bool(flags["log_prompts"]),
        request_templates=bool(flags["request_chat_templates"]),
        strict=bool(flags["strict"]),
        max_loaded=flags["max_loaded"],
        model_wait=flags["model_wait"],
        autoload=flags["models_autoload"],
        model_processes=flags["model_processes"],
        idle_unload=flags["idle_unload"],
        idle_sleep=flags["idle_sleep"],
        warm_up=flags["warm_up"] == "background",
        cors=tuple(flags["cors"]),
        page=flags["page"],
        runtime_adapters=bool(flags["runtime_adapters"]),
        slot_save_path=flags["slot_save_path"],
        files_dir=flags["files_dir"],
        max_file=flags["max_file"],
        max_files=flags["max_files"],
        responses_dir=flags["responses_dir"],
        max_responses=flags["max_responses"],
        responses_bytes=flags["responses_bytes"],
        responses_seconds=flags["responses_seconds"],
        template_variables=flags["chat_template_kwargs"] or {},
        logits_processors=named_functions(flags["logits_processor"]),
        allow_inspection=bool(flags["allow_inspection"]),
        inspection_bytes=flags["inspection_bytes"],
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
    values = {
        "engine.context": flags["ctx_size"],
        "engine.slots": flags["parallel"],
        "engine.max_adapters": flags["max_adapters"],
        "engine.max_adapter_rank": flags["max_adapter_rank"],
        "engine.cache_ram": flags["cache_ram"],
        "engine.cache_disk": flags["cache_disk"],
        "engine.cache_disk_size": flags["cache_disk_size"],
        "quantization.kv_cache": flags["kv_cache"],
        "prompt.tool_calls": flags["tool_call_parser"],
        "prompt.reasoning": flags["reasoning_parser"],
        "generation.thinking_token_budget": flags["reasoning_budget"],
        "generation.thinking_budget_message": flags["reasoning_budget_message"],
        "dtype": flags["dtype"] or None,
    }
    for key, value in values.items():
        if value is not None:
            overrides = merge(overrides, nested(key, value))
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
