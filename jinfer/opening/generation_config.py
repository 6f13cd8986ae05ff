"""generation_config.json and GGUF's keys: a checkpoint's defaults of sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from jinfer.checkpoint import Checkpoint
from jinfer.modelspec.spec_errors import SpecError, nearest_hint
from jinfer.opening.config_json import read_json
from jinfer.opening.source_errors import SourceError
from jinfer.sampling.param_field import ALIASES
from jinfer.sampling.sampling_params import SamplingParams

FILE = "generation_config.json"
KEY = "defaults"  # of `[generation]`: which defaults count beside its own
_CHOICES = ("checkpoint", "none")

# The file's words -> those of `SamplingParams`, as far as it has them.
_DRAWING = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p")}
_ALWAYS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "bad_words_ids": "bad_words_ids",
    "suppress_tokens": "banned_token_ids",
}
# What llama.cpp reads where its user says nothing.
_GGUF = {
    f"general.sampling.{key}": name
    for key, name in {
        "sequence": "samplers",
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "xtc_probability": "xtc_probability",
        "xtc_threshold": "xtc_threshold",
        "penalty_last_n": "penalty_last_n",
        "penalty_repeat": "repetition_penalty",
        "mirostat": "mirostat",
        "mirostat_tau": "mirostat_tau",
        "mirostat_eta": "mirostat_eta",
    }.items()
}
_LAST_N = 64  # tokens that llama.cpp's penalty looks at


def generation_config(checkpoint: Checkpoint) -> tuple[Path, dict[str, Any]]:
    """Where generation_config.json would be, and what it says; nothing where there is none.

    Files that carry their own metadata have none: of a GGUF file its own keys, of llama2.c's none.

    Raises:
        SourceError: it cannot be read.
    """
    if checkpoint.format == "gguf":
        metadata = checkpoint.metadata
        return checkpoint.path, {key: metadata[key] for key in _GGUF if key in metadata}
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    path = folder / FILE
    own = checkpoint.format == "llama2c" or not path.is_file()
    return path, {} if own else read_json(path)


def generation_defaults(
    own: Mapping[str, Any], said: Mapping[str, Any], path: Path, spec: str
) -> dict[str, Any]:
    """Values of `SamplingParams` that hold where a request says nothing.

    Args:
        own: `[generation]`, which wins; with `defaults = "none"` it is all there is.
        said: what generation_config.json says, or a GGUF file.
        path: that file, for errors.
        spec: the specification's file, for errors.

    Raises:
        SourceError: a value of the file that cannot be.
        SpecError: `[generation]` asks for defaults that are not known.
    """
    given = {name: value for name, value in own.items() if name != KEY}
    choice = own.get(KEY, _CHOICES[0])
    if choice not in _CHOICES:
        allowed = ", ".join(_CHOICES)
        raise SpecError(spec, f"generation.{KEY}", f"{choice!r} is not known; allowed: {allowed}")
    return given if choice == "none" else {**_file_defaults(said, path), **given}


def _file_defaults(said: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What the file says, in our words: filters count only where it says to draw."""
    draws = said.get("do_sample") is True
    known = {field.name for field in fields(SamplingParams)}
    found: dict[str, Any] = {}
    for key, name in {**(_DRAWING if draws else {}), **_ALWAYS, **_GGUF}.items():
        value = said.get(key)
        if value is None or name not in known:
            continue
        if name == "top_k" and value == -1:  # all
            continue
        if key in _GGUF:
            value = _of_llama_cpp(name, value)
        try:
            SamplingParams(**{name: value})
        except (TypeError, ValueError) as error:
            off = f'mend it, or set generation.{KEY} = "none"'
            raise SourceError(f"{path}: {key}: {error}; {off}") from error
        found[name] = value
    if found.get("repetition_penalty", 1) != 1 and said.keys() & _GGUF.keys():
        found.setdefault("penalty_last_n", _LAST_N)
    if draws:
        found.setdefault("temperature", 1.0)
    return found


def _of_llama_cpp(name: str, value: Any) -> Any:
    """A value as llama.cpp means it; one of another type as it is."""
    if name == "samplers" and isinstance(value, str):
        return tuple(value.split(";"))
    if name in ("temperature", "top_k") and type(value) in (int, float):
        return max(value, 0)
    return value


def check_defaults(values: Mapping[str, Any], path: str) -> None:
    """Raises `SpecError` unless these are sampling parameters."""
    allowed = [field.name for field in fields(SamplingParams)]
    for name in values:
        if name not in allowed and name not in ALIASES:
            raise SpecError(
                path, f"generation.{name}", f"unknown key; {nearest_hint(name, allowed)}"
            )
    try:
        SamplingParams.from_names(values)
    except (TypeError, ValueError) as error:
        raise SpecError(path, "generation", str(error)) from error
