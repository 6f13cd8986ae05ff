"""Opening a model: a source becomes specification, checkpoint, tokenizer and settings."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jinfer.images.placeholders import placeholder_id
from jinfer.loader.checkpoint import Checkpoint, open_checkpoint
from jinfer.loader.checkpoint.native_checkpoint import NativeCheckpoint
from jinfer.loader.config.classification_config import ClassificationConfig, find_classification
from jinfer.loader.config.config_json import (
    config_path,
    language_model,
    multimodal,
    quant_settings,
    read_config,
    with_image_processor,
)
from jinfer.loader.config.generation_config import (
    check_defaults,
    generation_config,
    generation_defaults,
    special_ids,
)
from jinfer.loader.config.pooling_config import PoolingSpec, find_pooling
from jinfer.loader.config.unused_config import check_unused
from jinfer.loader.hub import repository
from jinfer.loader.model_files import (
    AdapterFile,
    ModelFiles,
    adapter_files,
    mmproj_path,
    read_spec_file,
    tokenizer_path,
    with_own_heads,
)
from jinfer.loader.open_keywords import override_tables
from jinfer.loader.resolve_model import reads_images, resolve_model
from jinfer.loader.sources import full_source, locate
from jinfer.loader.weights.tensor_mapping import by_name
from jinfer.modelspec.bounded_types import DEFAULT_CONTEXT
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_files import read_toml
from jinfer.ops.matmul.dense import reads_16_bit_weights
from jinfer.quant.quantized_tensor import Activations
from jinfer.quant_format import Kind, parse_cache_dtype
from jinfer.template.chat_prompt import Conversation
from jinfer.template.thinking_marks import ThinkingMarks, thinking_marks
from jinfer.tokenizer import Tokenizer, load_tokenizer

_log = logging.getLogger("jinfer")

_QUANTIZED = ("safetensors", "pickle")  # formats that quantized checkpoints of others have


@dataclass(frozen=True)
class Opened:
    """A model whose weights are not loaded yet.

    Attributes:
        spec: its architecture and settings.
        checkpoint: the weights' tensors.
        tokenizer: None if the checkpoint has none.
        conversation: renders messages as a prompt.
        pooling: turns the vectors of tokens into the vector of a text.
        classification: the labels and activation of a classification head; None without a head.
        defaults: default values of `SamplingParams`, from `[generation]` and
            generation_config.json.
        context: the maximum number of tokens of a sequence.
        dtype: of weights and computation.
        activations: how products with quantized weights round activations on a CPU.
        kv_cache: the type of the KV cache.
        end_ids: end-of-sequence tokens.
        decoder_prefix: tokens that the decoder of an encoder-decoder starts with.
        adapters: LoRA adapters that are loaded with it.
        thinking: the marks around its reasoning; None if it has none.
        images: the tensors of its encoder of images; None if it has none.
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
    images: Checkpoint | None = None

    @cached_property
    def title(self) -> str:
        """The name of the repository, of the specification or of the file."""
        path = Path(self.spec.path)
        return repository(path) or (path.stem if path.suffix == ".toml" else path.name)

    @cached_property
    def family(self) -> str:
        """The family in the specification, or the architecture in a GGUF file; else ""."""
        path, family = Path(self.spec.path), None
        if path.suffix == ".toml":
            family = read_toml(path).get("family")
        return str(family or self.checkpoint.metadata.get("general.architecture", ""))

    @cached_property
    def stored_as(self) -> str:
        """The format of the weights: the one in the specification, or the file's main type."""
        weights, sizes = self.spec.quantization.weights, Counter[str]()
        if weights.startswith("q"):
            return weights
        for tensor in self.checkpoint.tensors.values():
            sizes[tensor.type.lower()] += tensor.nbytes
        return next((name for name, _ in sizes.most_common(1)), weights)


def open_model(source: str | Path, overrides: Mapping[str, Any], *, alone: bool = True) -> Opened:
    """Open a model without loading its weights.

    Args:
        source: a path, a model's name, or an address of a hub or of a package.
        overrides: keys of the specification (dotted names) and the values that replace theirs.
        alone: refuse a draft head, which needs another model.

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
    check_unused(unused, files.config, spec)
    images = image_checkpoint(files, spec)
    if spec.vision is not None:
        table = files.config.get("vision_config", {})
        own = {k.removeprefix("vision_config."): v for k, v in unused.items()}
        check_unused({k: own[k] for k in own.keys() & table.keys()}, table, spec.vision)
    elif images is not None and images.tensors:
        _log.warning("%s: reads text alone: images and sounds are left out", spec.path)
    elif reads_images(files):
        _log.warning("%s: reads text alone: it has no tensors of its image encoder", spec.path)
    adapters = adapter_files(spec, files, tables)
    spec, checkpoint = with_own_heads(spec, files.checkpoint, adapters)
    generation, path = generation_config(checkpoint)
    defaults = generation_defaults(spec.generation, generation, path, spec.path)
    check_defaults(defaults, spec.path)
    folder, vocab = tokenizer_path(files, tables), spec.dims.get("vocab")
    inside = checkpoint.format == "gguf" and folder == checkpoint.path
    metadata = checkpoint.metadata if inside else None
    tokenizer = load_tokenizer(folder, metadata=metadata, vocab_size=vocab, trust=files.trust)
    if spec.image is not None and tokenizer is not None:
        placeholder = placeholder_id(tokenizer, spec.image)
        spec = replace(spec, image=replace(spec.image, placeholder=placeholder))
    conversation = Conversation.of(spec, folder, files.config)
    thinking = None
    if tokenizer is not None:
        thinking = thinking_marks(conversation.jinja or "", tokenizer, spec.prompt.reasoning)
    if thinking is None:  # the budget may be a default for several models
        defaults.pop("thinking_token_budget", None)
    ends, starts = special_ids(generation, files.config, vocab, tokenizer, checkpoint.path)
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
        end_ids=ends,
        decoder_prefix=starts,
        adapters=adapters,
        thinking=thinking,
        images=images if spec.vision is not None else None,
    )


def open_files(source: str | Path, overrides: Mapping[str, Any]) -> ModelFiles:
    """Open the specification and the checkpoint of a source, whether or not a family matches it.

    Args:
        overrides: tables that take precedence over the specification.

    Raises:
        SourceError, SpecError, CheckpointError: one line with the file and what to do.
    """
    source = full_source(source, Path.cwd())
    files = read_spec_file(source, locate(source, Path.cwd()), overrides)
    checkpoint, path = open_checkpoint(files.weights), config_path(files.weights)
    whole = with_image_processor(read_config(path, checkpoint), path.parent)
    config = language_model(whole)
    if checkpoint.format in _QUANTIZED and not isinstance(checkpoint, NativeCheckpoint):
        # Imported here, because GGUF files need none of the layouts.
        from jinfer.loader.checkpoint.layouts.quant_layouts import decode_quantized

        checkpoint = decode_quantized(checkpoint, quant_settings(config, path))
    images = mmproj_path(files, checkpoint, overrides)
    mmproj = None if images is None else open_checkpoint(images)
    if mmproj is not None:
        config = {k: v for k, v in mmproj.metadata.items() if k.startswith("clip.")} | dict(config)
    return ModelFiles(
        **vars(files),
        checkpoint=checkpoint,
        config=config,
        multimodal=multimodal(whole),
        mmproj=mmproj,
    )


def image_checkpoint(files: ModelFiles, spec: ModelSpec) -> Checkpoint | None:
    """Return the tensors of a model's encoder of images and of what else its text does not need."""
    if files.mmproj is not None:
        return files.mmproj
    if files.multimodal is not None:
        return files.multimodal.others(files.checkpoint)
    if spec.vision is None:
        return None
    seen = by_name(files.checkpoint, spec.vision.tensors)
    patterns = spec.vision.tensors.patterns
    kept = {t.name: t for n, t in seen.items() if any(fnmatchcase(n, p) for p in patterns)}
    return replace(files.checkpoint, tensors=kept)


def context_length(spec: ModelSpec) -> int:
    """Return the maximum number of tokens of a sequence. Raises `SpecError`."""
    trained, chosen = spec.dims.get("context"), spec.engine.context
    if chosen and trained and chosen > trained * spec.dynamic_factor:
        raise SpecError(
            spec.path,
            "engine.context",
            f"{chosen} is above the {trained} tokens the model was made for; "
            f"if its positions allow more, set dims.context too",
        )
    return chosen or min(trained or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def compute_dtype(name: str) -> str:
    """Return the type of weights and computation for a specification's `dtype`."""
    if name != "auto":
        return name
    # XLA:CPU converts all weights of a one-row product in bfloat16 first.
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def activation_type(spec: ModelSpec) -> Activations:
    """Return how products on a CPU round activations: not at all if `dtype` is float32."""
    if spec.quantization.activations != "auto":
        return spec.quantization.activations
    return "float" if spec.dtype == "float32" else "int8"


def adapter_dtype(spec: ModelSpec) -> str:
    """Return the type of LoRA adapters in slots; with "auto" it has 16 bits on a CPU too."""
    if spec.engine.adapter_dtype != "auto":
        return spec.engine.adapter_dtype
    half = spec.dtype == "auto" and reads_16_bit_weights()
    return "float16" if half else compute_dtype(spec.dtype)


def kv_cache_type(spec: ModelSpec) -> Kind:
    """Return the type of the KV cache; with "auto" it has 16 bits on a CPU too."""
    if spec.quantization.kv_cache != "auto":
        return parse_cache_dtype(spec.quantization.kv_cache)
    on_cpu = spec.dtype == "auto" and jax.default_backend() == "cpu"
    return parse_cache_dtype("f16") if on_cpu else np.dtype(compute_dtype(spec.dtype))
