"""generation_config.json and GGUF metadata: default sampling parameters and special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from jinfer.loader.checkpoint import Checkpoint
from jinfer.loader.config.config_json import read_json
from jinfer.loader.config.source_errors import SourceError
from jinfer.modelspec.spec_errors import SpecError, nearest_hint, show_value
from jinfer.sampling.param_field import ALIASES
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.tokenizer import Tokenizer
from jinfer.tokenizer.tokenizer_config import MAX_TOKENS

FILE = "generation_config.json"
KEY = "defaults"  # of `[generation]`: whether the defaults of the checkpoint apply
_CHOICES = ("checkpoint", "none")

# Keys of generation_config.json -> fields of `SamplingParams`. The first only with do_sample.
_SAMPLING = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p")}
_ALWAYS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "bad_words_ids": "bad_words_ids",
    "suppress_tokens": "banned_token_ids",
}
# Keys of GGUF metadata, which llama.cpp reads as defaults.
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
_LAST_N = 64  # tokens that the penalty of llama.cpp considers


def generation_config(checkpoint: Checkpoint) -> tuple[Mapping[str, Any], Path]:
    """Read generation_config.json, or the corresponding keys of GGUF metadata.

    Returns:
        Its keys, none if there is no such file, and the file's path.

    Raises:
        SourceError: it cannot be read.
    """
    if checkpoint.format == "gguf":
        metadata = checkpoint.metadata
        return {key: metadata[key] for key in _GGUF if key in metadata}, checkpoint.path
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    path = folder / FILE
    missing = checkpoint.format == "llama2c" or not path.is_file()
    return {} if missing else read_json(path), path


def generation_defaults(
    own: Mapping[str, Any], config: Mapping[str, Any], path: Path, spec_path: str
) -> dict[str, Any]:
    """Return the values of `SamplingParams` that apply where a request has none.

    Args:
        own: `[generation]`, which takes precedence; with `defaults = "none"` it is used alone.
        config: generation_config.json, or metadata of a GGUF file.
        path: that file, for errors.
        spec_path: the specification, for errors.

    Raises:
        SourceError: the file has an invalid value.
        SpecError: `[generation]` has an invalid value of `defaults`.
    """
    values = {name: value for name, value in own.items() if name != KEY}
    choice = own.get(KEY, _CHOICES[0])
    if choice not in _CHOICES:
        allowed = ", ".join(_CHOICES)
        raise SpecError(
            spec_path, f"generation.{KEY}", f"{choice!r} is not known; allowed: {allowed}"
        )
    return values if choice == "none" else {**_file_defaults(config, path), **values}


def _file_defaults(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Translate the file's keys; filters such as top_k apply only with `do_sample`."""
    samples = config.get("do_sample") is True
    known = {field.name for field in fields(SamplingParams)}
    found: dict[str, Any] = {}
    for key, name in {**(_SAMPLING if samples else {}), **_ALWAYS, **_GGUF}.items():
        value = config.get(key)
        if value is None or name not in known:
            continue
        if name == "top_k" and value == -1:  # no limit
            continue
        if key in _GGUF:
            value = _from_llama_cpp(name, value)
        try:
            SamplingParams(**{name: value})
        except (TypeError, ValueError) as error:
            advice = f'mend it, or set generation.{KEY} = "none"'
            raise SourceError(f"{path}: {key}: {error}; {advice}") from error
        found[name] = value
    if found.get("repetition_penalty", 1) != 1 and config.keys() & _GGUF.keys():
        found.setdefault("penalty_last_n", _LAST_N)
    if samples:
        found.setdefault("temperature", 1.0)
    return found


def _from_llama_cpp(name: str, value: Any) -> Any:
    """Convert a value with llama.cpp's meaning; a value of an unexpected type is unchanged."""
    if name == "samplers" and isinstance(value, str):
        return tuple(value.split(";"))
    if name in ("temperature", "top_k") and type(value) in (int, float):
        return max(value, 0)
    return value


def check_defaults(values: Mapping[str, Any], path: str) -> None:
    """Raise `SpecError` unless these are valid sampling parameters."""
    allowed = [field.name for field in fields(SamplingParams)]
    for name in values:
        if name not in allowed and name not in ALIASES:
            hint = nearest_hint(name, allowed)
            raise SpecError(path, f"generation.{name}", f"unknown key; {hint}")
    try:
        SamplingParams.from_names(values)
    except (TypeError, ValueError) as error:
        raise SpecError(path, "generation", str(error)) from error


def special_ids(
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    vocab: int | None,
    tokenizer: Tokenizer | None,
    path: Path,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the end-of-sequence tokens, and the tokens that a decoder starts with.

    The second applies to encoder-decoders.

    Args:
        generation: generation_config.json, which takes precedence over `config`.
        config: config.json, or GGUF metadata.
        vocab: size of the vocabulary; None: unknown.
        path: the checkpoint, for errors.

    Raises:
        SourceError: a token that is not in the vocabulary.
    """
    size = MAX_TOKENS if vocab is None else vocab

    def checked(key: str) -> tuple[int, ...]:
        return _checked_ids(config, size, key, path)

    key = "eos_token_id"
    listed = _ids(generation.get(key)) or _ids(config.get(key))
    ends = dict.fromkeys((*(tokenizer.eos_ids if tokenizer else ()), *listed))
    starts = ("decoder_start_token_id", "forced_bos_token_id")
    return (
        tuple(id for id in ends if 0 <= id < size) or checked(key),
        tuple(id for key in starts for id in _ids(generation.get(key)) or checked(key)),
    )


def _ids(value: Any) -> tuple[int, ...]:
    """Return the token ids in a JSON value: an id, a list of ids, or neither."""
    listed = value if isinstance(value, list) else [value]
    return tuple(id for id in listed if isinstance(id, int) and not isinstance(id, bool))


def _checked_ids(config: Mapping[str, Any], vocab: int, key: str, path: Path) -> tuple[int, ...]:
    """Return the token ids at a key of config.json or of GGUF metadata. Raises `SourceError`."""
    architecture = config.get("general.architecture")
    names = (key, f"tokenizer.ggml.{key}", f"{architecture}.{key}")  # the last: T5 in GGUF
    ids = next((config[name] for name in names if name in config), None)
    listed = [id for id in (ids if isinstance(ids, list) else [ids]) if id is not None]
    for id in listed:
        if type(id) is not int or not 0 <= id < vocab:
            reason = f"{key} has {show_value(id)}, which is no id of a vocabulary of {vocab}"
            raise SourceError(f"{path}: {reason}")
    return tuple(listed)
