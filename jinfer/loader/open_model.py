"""Opening a model: from what the user points at to all that is known before weights are loaded."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jinfer.loader.adapters.adapter_files import AdapterFile, adapter_files, with_own_heads
from jinfer.loader.chat_prompt import Conversation
from jinfer.loader.checkpoint import Checkpoint, open_checkpoint
from jinfer.loader.checkpoint.native_checkpoint import NativeCheckpoint
from jinfer.loader.config.classification_config import ClassificationConfig, find_classification
from jinfer.loader.config.config_json import language_model, multimodal, quant_settings, read_config
from jinfer.loader.config.generation_config import (
    check_defaults,
    decoder_prefix,
    end_ids,
    generation_config,
    generation_defaults,
)
from jinfer.loader.config.pooling_config import PoolingSpec, find_pooling
from jinfer.loader.config.unused_config import check_followed
from jinfer.loader.hub import repository
from jinfer.loader.model_files import ModelFiles, read_spec_file, tokenizer_path
from jinfer.loader.open_keywords import override_tables
from jinfer.loader.resolve_model import resolve_model
from jinfer.loader.sources import full_source, locate
from jinfer.modelspec.bounded_types import DEFAULT_CONTEXT
from jinfer.modelspec.cache_dtype import Kind, parse_cache_dtype
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_files import read_toml
from jinfer.ops.matmul.half_precision import reads_16_bit_weights
from jinfer.quant.quantized_tensor import Activations
from jinfer.template.thinking_marks import ThinkingMarks, thinking_marks
from jinfer.tokenizer import Tokenizer, load_tokenizer

_log = logging.getLogger("jinfer")

QUANTIZED = ("safetensors", "pickle")  # formats of checkpoints that layouts are known of


@dataclass(frozen=True)
class Opened:
    """A model whose weights are yet to be loaded.

    Attributes:
        spec, checkpoint: how it is built, and from what.
        tokenizer: None where the checkpoint has none.
        conversation: how messages become a prompt.
        pooling: how vectors of tokens become one.
        classification: how scores of classes are read; None without a head for them.
        defaults: of `SamplingParams`, from `[generation]` and generation_config.json.
        context: tokens a sequence may have.
        dtype: of weights and computation.
        activations: of products with quantized weights on a CPU.
        kv_cache: what numbers of the cache are kept as.
        end_ids: ends of sequence.
        decoder_prefix: what the answer of an encoder-decoder starts from.
        adapters: LoRA adapters that are loaded with it.
        thinking: what its thoughts stand between; None if it has none.
    """

    spec: ModelSpec
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    conversation: Conversation
    pooling: PoolingSpec
    classification: ClassificationConfig | None
    defaults: Mapping[str, Any]
    context: int
    dtype: str
    activations: Activations
    kv_cache: Kind
    end_ids: tuple[int, ...]
    decoder_prefix: tuple[int, ...]
    adapters: tuple[AdapterFile, ...] = ()
    thinking: ThinkingMarks | None = None


def open_model(source: str | Path, overrides: Mapping[str, Any], *, alone: bool = True) -> Opened:
    """Opens a source, with keys of the specification (dotted names) set by the user.

    Args:
        alone: it may not be a head, which only drafts for another model.

    Raises:
        SourceError, SpecError, CheckpointError, TokenizerError, TemplateError, RequestError: one
            line each.
    """
    tables = override_tables(overrides)
    files = open_files(source, tables)
    spec, unused = resolve_model(files, tables)
    if alone and spec.follows is not None:
        reason = "it drafts for another model: open that one, and name this in speculation.draft"
        raise SpecError(spec.path, "decoder.follows", reason)
    check_followed(unused, files.config, spec)
    if files.multimodal is not None and files.multimodal.leaves_out(files.checkpoint):
        _log.warning("%s: reads text alone: images and sounds are left out", spec.path)
    adapters = adapter_files(spec, files, tables)
    spec, checkpoint = with_own_heads(spec, files.checkpoint, adapters)
    vocab = spec.dims.get("vocab")
    file, said = generation_config(checkpoint)
    defaults = generation_defaults(spec.generation, said, file, spec.path)
    check_defaults(defaults, spec.path)
    words = tokenizer_path(files, tables)
    carried = checkpoint.format == "gguf" and words == checkpoint.path
    metadata = checkpoint.metadata if carried else None
    tokenizer = load_tokenizer(words, metadata=metadata, vocab_size=vocab, trust=files.trust)
    conversation = Conversation.of(spec, words, files.config)
    thinking = None
    if tokenizer is not None:
        thinking = thinking_marks(conversation.jinja or "", tokenizer, spec.prompt.reasoning)
    if thinking is None:  # a default budget, which may be meant for several models
        defaults.pop("thinking_token_budget", None)
    return Opened(
        spec=spec,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        conversation=conversation,
        pooling=find_pooling(spec, checkpoint, files.config),
        classification=find_classification(spec, checkpoint, files.config),
        defaults=defaults,
        context=context_length(spec),
        dtype=compute_dtype(spec.dtype),
        activations=activation_type(spec),
        kv_cache=kv_cache_type(spec),
        end_ids=end_ids(checkpoint, files.config, said, vocab, tokenizer),
        decoder_prefix=decoder_prefix(checkpoint, files.config, said, vocab),
        adapters=adapters,
        thinking=thinking,
    )


def open_files(source: str | Path, overrides: Mapping[str, Any]) -> ModelFiles:
    """Opens what a user points at, whether or not a family fits it.

    Args:
        overrides: tables laid over the specification.

    Raises:
        SourceError, SpecError, CheckpointError: one line with the file and what to do.
    """
    source = full_source(source, Path.cwd())
    file = read_spec_file(source, locate(source, Path.cwd()), overrides)
    checkpoint = open_checkpoint(file.weights)
    whole = read_config(file.weights, checkpoint)
    config, found = language_model(whole), multimodal(whole)
    if checkpoint.format in QUANTIZED and not isinstance(checkpoint, NativeCheckpoint):
        # Imported here, because GGUF files need none of the layouts.
        from jinfer.loader.checkpoint.layouts.quant_layouts import decode_quantized

        checkpoint = decode_quantized(checkpoint, quant_settings(config, file.weights))
    return ModelFiles(**vars(file), checkpoint=checkpoint, config=config, multimodal=found)


def title(opened: Opened) -> str:
    """A model's name: its repository's, its specification's or its file's."""
    path = Path(opened.spec.path)
    return repository(path) or (path.stem if path.suffix == ".toml" else path.name)


def family(opened: Opened) -> str:
    """Where the specification, or a GGUF file, says it."""
    path, named = Path(opened.spec.path), None
    if path.suffix == ".toml":
        named = read_toml(path).get("family")
    return str(named or opened.checkpoint.metadata.get("general.architecture", ""))


def stored_as(opened: Opened) -> str:
    """How weights are kept: as asked, else as most of the file is."""
    asked, sizes = opened.spec.quantization.weights, Counter[str]()
    for tensor in opened.checkpoint.tensors.values():
        sizes[tensor.type.lower()] += tensor.nbytes
    return asked if asked.startswith("q") else next((t for t, _ in sizes.most_common(1)), asked)


def context_length(spec: ModelSpec) -> int:
    """Tokens that a sequence may have. Raises `SpecError`."""
    trained, asked = spec.dims.get("context"), spec.engine.context
    if asked and trained and asked > trained * spec.dynamic_factor:
        raise SpecError(
            spec.path,
            "engine.context",
            f"{asked} is above the {trained} tokens the model was made for; "
            f"if its positions allow more, set dims.context too",
        )
    return asked or min(trained or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def compute_dtype(name: str) -> str:
    """The type of weights and computation, of a specification's `dtype`."""
    if name != "auto":
        return name
    # XLA:CPU converts all weights of a one-row product in bfloat16 first.
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def activation_type(spec: ModelSpec) -> Activations:
    """How products on a CPU round activations; who asks for float32 wants the numbers it gives."""
    named = spec.quantization.activations
    if named != "auto":
        return named
    return "float" if spec.dtype == "float32" else "int8"


def adapter_dtype(spec: ModelSpec) -> str:
    """The type of LoRA adapters in slots: `dtype` if it is named, else 16 bits on a CPU, too.

    `engine.adapter_dtype` has the say if it is not "auto".
    """
    if spec.engine.adapter_dtype != "auto":
        return spec.engine.adapter_dtype
    half = spec.dtype == "auto" and reads_16_bit_weights()
    return "float16" if half else compute_dtype(spec.dtype)


def kv_cache_type(spec: ModelSpec) -> Kind:
    """The type of the KV cache: `dtype` if it is named, else 16 bits on a CPU, too."""
    named = spec.quantization.kv_cache
    if named != "auto":
        return parse_cache_dtype(named)
    on_cpu = spec.dtype == "auto" and jax.default_backend() == "cpu"
    return parse_cache_dtype("f16") if on_cpu else np.dtype(compute_dtype(spec.dtype))
