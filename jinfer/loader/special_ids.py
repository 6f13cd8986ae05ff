"""Special tokens: the ends of a sequence, and the start of a decoder's answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinfer.loader.config.source_errors import SourceError
from jinfer.loader.model_files import ModelFiles
from jinfer.modelspec.spec_errors import show_value
from jinfer.tokenizer import Tokenizer
from jinfer.tokenizer.tokenizer_config import MAX_TOKENS


def end_ids(
    files: ModelFiles, vocab: int | None, tokenizer: Tokenizer | None, defaults: Mapping[str, Any]
) -> tuple[int, ...]:
    """The ends of a sequence: the tokenizer's, and the checkpoint's.

    Args:
        defaults: generation_config.json, which counts before config.json.

    Raises:
        SourceError: a token that the vocabulary does not have.
    """
    key, size = "eos_token_id", MAX_TOKENS if vocab is None else vocab
    listed = _ids(defaults.get(key)) or _ids(files.config.get(key))
    ends = dict.fromkeys((*(tokenizer.eos_ids if tokenizer else ()), *listed))
    return tuple(id for id in ends if 0 <= id < size) or _checked_ids(files, size, key)


def decoder_prefix(
    files: ModelFiles, vocab: int | None, defaults: Mapping[str, Any]
) -> tuple[int, ...]:
    """What the answer of an encoder-decoder starts from; arguments and errors as of `end_ids`."""
    size = MAX_TOKENS if vocab is None else vocab
    return tuple(
        id
        for key in ("decoder_start_token_id", "forced_bos_token_id")
        for id in _ids(defaults.get(key)) or _checked_ids(files, size, key)
    )


def _ids(value: Any) -> tuple[int, ...]:
    """The token ids of a value of JSON: one, a list of them, or none."""
    listed = value if isinstance(value, list) else [value]
    return tuple(id for id in listed if isinstance(id, int) and not isinstance(id, bool))


def _checked_ids(files: ModelFiles, vocab: int, key: str) -> tuple[int, ...]:
    """The token ids at a key of config.json, or of GGUF metadata. Raises `SourceError`."""
    architecture = files.config.get("general.architecture")
    names = (key, f"tokenizer.ggml.{key}", f"{architecture}.{key}")  # GGUF has T5's under the last
    ids = next((files.config[name] for name in names if name in files.config), None)
    listed = [id for id in (ids if isinstance(ids, list) else [ids]) if id is not None]
    for id in listed:
        if type(id) is not int or not 0 <= id < vocab:
            reason = f"{key} has {show_value(id)}, which is no id of a vocabulary of {vocab}"
            raise SourceError(f"{files.checkpoint.path}: {reason}")
    return tuple(listed)
