"""What is settled once when a model is opened: tokenizer, template, context, types, defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jinfer.checkpoint import Checkpoint
from jinfer.modelspec.bounded_types import DEFAULT_CONTEXT
from jinfer.modelspec.cache_dtype import Kind, parse_kind
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.spec_errors import SpecError, nearest, show
from jinfer.modelspec.toml_tables import merge, nested
from jinfer.opening.chat_prompt import Conversation
from jinfer.opening.generation_config import generation_config, generation_defaults, token_ids
from jinfer.opening.open_keywords import check_keywords
from jinfer.opening.pooling_config import PoolingSpec, find_pooling
from jinfer.opening.resolve_model import Recognized, recognize
from jinfer.opening.sources import SourceError
from jinfer.opening.unused_config import check_followed
from jinfer.quant.quantized_tensor import Activations
from jinfer.sampling.param_names import PARAMETERS
from jinfer.sampling.sampling_params import SamplingParams
from jinfer.tokenizer import Tokenizer, load_tokenizer
from jinfer.tokenizer.tokenizer_config import MAX_TOKENS


@dataclass(frozen=True)
class Opened:
    """A model whose weights are yet to be loaded.

    Attributes:
        spec, checkpoint: how it is built, and from what.
        tokenizer: None where the checkpoint has none.
        conversation: how messages become a prompt.
        pooling: how vectors of tokens become one.
        defaults: of `SamplingParams`, from `[generation]` and generation_config.json.
        context: tokens a sequence may have.
        dtype: of weights and computation.
        activations: of products with quantized weights on a CPU.
        kv_cache: what numbers of the cache are kept as.
        end_ids: ends of sequence.
        decoder_prefix: what the answer of an encoder-decoder starts from.
    """

    spec: ModelSpec
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    conversation: Conversation
    pooling: PoolingSpec
    defaults: Mapping[str, Any]
    context: int
    dtype: str
    activations: Activations
    kv_cache: Kind
    end_ids: tuple[int, ...]
    decoder_prefix: tuple[int, ...]


def open_model(source: str | Path, overrides: Mapping[str, Any], *, alone: bool = True) -> Opened:
    """Opens a source, with keys of the specification (dotted names) set by the user.

    Args:
        alone: it may not be a head, which only drafts for another model.

    Raises:
        SourceError, SpecError, CheckpointError, TokenizerError, TemplateError, RequestError: one
            line each.
    """
    check_keywords(overrides)
    tables: dict[str, Any] = {}
    for key, value in overrides.items():
        tables = merge(tables, nested(key, value))
    found = recognize(source, tables)
    if alone and found.spec.follows is not None:
        reason = "it drafts for another model: open that one, and name this in speculation.draft"
        raise SpecError(found.spec.path, "decoder.follows", reason)
    check_followed(found.unread, found.config, found.spec)
    file, said = generation_config(found.checkpoint)
    defaults = generation_defaults(found.spec.generation, said, file, found.spec.path)
    sampling_params(defaults, found.spec.path)  # wrong ones show at once
    tokenizer = _tokenizer(found)
    return Opened(
        spec=found.spec,
        checkpoint=found.checkpoint,
        tokenizer=tokenizer,
        conversation=Conversation.of(found.spec, found.tokenizer, found.config),
        pooling=find_pooling(found),
        defaults=defaults,
        context=_context(found.spec),
        dtype=_dtype(found.spec.dtype),
        activations=_activations(found.spec),
        kv_cache=_kv_cache(found.spec),
        end_ids=_end_ids(found, tokenizer, said),
        decoder_prefix=tuple(
            id
            for key in ("decoder_start_token_id", "forced_bos_token_id")
            for id in token_ids(said.get(key)) or _ids(found, key)
        ),
    )


def sampling_params(values: Mapping[str, Any], path: str) -> SamplingParams:
    """Sampling parameters from `[generation]`. Raises `SpecError`."""
    allowed = [field.name for field in fields(SamplingParams)]
    for name in values:
        if name not in allowed and name not in PARAMETERS:
            raise SpecError(path, f"generation.{name}", f"unknown key; {nearest(name, allowed)}")
    try:
        return SamplingParams.from_names(values)
    except (TypeError, ValueError) as error:
        raise SpecError(path, "generation", str(error)) from error


def _tokenizer(found: Recognized) -> Tokenizer | None:
    own = found.checkpoint.format == "gguf" and found.tokenizer == found.checkpoint.path
    return load_tokenizer(
        found.tokenizer,
        metadata=found.checkpoint.metadata if own else None,
        vocab_size=found.spec.dims.get("vocab"),
        trust=found.trust,
    )


def _dtype(name: str) -> str:
    if name != "auto":
        return name
    # One-row products in bfloat16 convert all weights first on XLA:CPU, and take five times longer.
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def _activations(spec: ModelSpec) -> Activations:
    """Who asks for float32 wants the numbers that it gives."""
    named = spec.quantization.activations
    if named != "auto":
        return named
    return "float" if spec.dtype == "float32" else "int8"


def _kv_cache(spec: ModelSpec) -> Kind:
    """Who asks for a type wants it kept; else a CPU, too, keeps 16 bits, as other engines do.

    For SmolLM2-135M that is 1.1 times as fast at 1,500 tokens, and changes nothing measurable.
    """
    named = spec.quantization.kv_cache
    if named != "auto":
        return parse_kind(named)
    on_cpu = spec.dtype == "auto" and jax.default_backend() == "cpu"
    return parse_kind("f16") if on_cpu else np.dtype(_dtype(spec.dtype))


def _context(spec: ModelSpec) -> int:
    trained, asked = spec.dims.get("context"), spec.engine.context
    if asked and trained and asked > trained * spec.stretch:
        raise SpecError(
            spec.path,
            "engine.context",
            f"{asked} is above the {trained} tokens the model was made for; "
            f"if its positions allow more, set dims.context too",
        )
    return asked or min(trained or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def _end_ids(
    found: Recognized, tokenizer: Tokenizer | None, said: Mapping[str, Any]
) -> tuple[int, ...]:
    """The tokenizer's, and generation_config.json's, or config.json's where that gives none."""
    key, vocab = "eos_token_id", found.spec.dims.get("vocab", MAX_TOKENS)
    listed = token_ids(said.get(key)) or token_ids(found.config.get(key))
    ends = dict.fromkeys((*(tokenizer.eos_ids if tokenizer else ()), *listed))
    return tuple(id for id in ends if 0 <= id < vocab) or _ids(found, key)


def _ids(found: Recognized, key: str) -> tuple[int, ...]:
    """The token ids at a key of config.json, or of GGUF metadata. Raises `SourceError`."""
    ids = found.config.get(key, found.config.get(f"tokenizer.ggml.{key}"))
    vocab = found.spec.dims.get("vocab", MAX_TOKENS)
    listed = [id for id in (ids if isinstance(ids, list) else [ids]) if id is not None]
    for id in listed:
        if type(id) is not int or not 0 <= id < vocab:
            reason = f"{key} has {show(id)}, which is no id of a vocabulary of {vocab}"
            raise SourceError(f"{found.checkpoint.path}: {reason}")
    return tuple(listed)
