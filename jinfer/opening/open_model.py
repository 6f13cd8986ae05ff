"""Opening a model: from what the user points at to all that is known before weights are loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinfer.checkpoint import Checkpoint, open_checkpoint
from jinfer.checkpoint.native_checkpoint import NativeCheckpoint
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.quant_format import Kind
from jinfer.modelspec.spec_errors import SpecError
from jinfer.opening.adapter_files import AdapterFile, adapter_files, with_own_heads
from jinfer.opening.chat_prompt import Conversation
from jinfer.opening.classification_config import ClassificationConfig, find_classification
from jinfer.opening.compute_settings import (
    activation_type,
    compute_dtype,
    context_length,
    kv_cache_type,
)
from jinfer.opening.config_json import read_config
from jinfer.opening.generation_config import check_defaults, generation_config, generation_defaults
from jinfer.opening.model_files import ModelFiles, read_spec_file, tokenizer_path
from jinfer.opening.multimodal import language_model, multimodal
from jinfer.opening.open_keywords import override_tables
from jinfer.opening.pooling_config import PoolingSpec, find_pooling
from jinfer.opening.quantization_config import quant_settings
from jinfer.opening.resolve_model import resolve_model
from jinfer.opening.resolve_name import full_source
from jinfer.opening.sources import locate
from jinfer.opening.special_ids import decoder_prefix, end_ids
from jinfer.opening.unused_config import check_followed
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
        end_ids=end_ids(files, vocab, tokenizer, said),
        decoder_prefix=decoder_prefix(files, vocab, said),
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
        from jinfer.checkpoint.layouts.quant_layouts import decode_quantized

        checkpoint = decode_quantized(checkpoint, quant_settings(config, file.weights))
    return ModelFiles(**vars(file), checkpoint=checkpoint, config=config, multimodal=found)
