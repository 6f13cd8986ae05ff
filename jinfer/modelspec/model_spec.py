"""Model specification, resolved: every value is evaluated, every key checked."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jinfer.modelspec.block import Block
from jinfer.modelspec.blocks import HeadSpec
from jinfer.modelspec.bounded_types import Count, NotNegative, Positive, Size
from jinfer.modelspec.image_table import ImageSpec
from jinfer.modelspec.layer_spec import FollowSpec, StackSpec
from jinfer.modelspec.partition_table import PartitionSpec
from jinfer.modelspec.position_blocks import RopeScalingSpec, RopeSpec
from jinfer.modelspec.quantization_table import QuantizationSpec
from jinfer.modelspec.spec_errors import SpecError, show_value
from jinfer.modelspec.spec_values import SpecValues
from jinfer.modelspec.speculation_table import SpeculationSpec
from jinfer.modelspec.table_reader import fields, read_value
from jinfer.modelspec.tensor_names import TensorMap
from jinfer.modelspec.toml_tables import as_table, check_keys, check_text, check_texts

Activation = Literal["identity", "sigmoid", "softmax"]
PLACES = ("{query}", "{document}")


@dataclass(frozen=True)
class ClassificationSpec:
    """How scores of classes are read: `[classification]`.

    Attributes:
        labels: names of the classes; none: as the checkpoint says, else LABEL_0, LABEL_1, ...
        activation: what makes a probability of a score; none: as the checkpoint says, else
            `sigmoid` of one class, `softmax` of several.
        relevance: the number of the class whose score ranks documents; none: the only one, or as
            the checkpoint says.
        pair: the text that a pair becomes, with {query} and {document} in it; none: as the
            tokenizer joins two texts.
    """

    labels: tuple[str, ...] | None = None
    activation: Activation | None = None
    relevance: Count | None = None
    pair: str | None = None


def read_classification(written: Any, values: SpecValues) -> ClassificationSpec:
    """Reads the table. Raises `SpecError`."""
    path, where = values.path, "classification"
    types = {name: type_ for name, (_, type_) in fields(ClassificationSpec).items()}
    table = check_keys(as_table(written, path, where), types, path, where)
    found: dict[str, Any] = {
        name: read_value(types[name], table[name], values, f"{where}.{name}")
        for name in ("activation", "relevance")
        if name in table
    }
    if "labels" in table:
        found["labels"] = tuple(check_texts(table["labels"], path, f"{where}.labels"))
    if "pair" in table:
        found["pair"] = check_pair(check_text(table["pair"], path, f"{where}.pair"), path)
    return ClassificationSpec(**found)


def check_pair(text: str, path: object) -> str:
    """A text of a pair. Raises `SpecError` unless it has both places once."""
    for place in PLACES:
        if text.count(place) != 1:
            reason = f"has {place} {text.count(place)} times; it has to be there once"
            raise SpecError(path, "classification.pair", reason)
    return text


def class_count(stack: StackSpec, shared: tuple[tuple[str, Block], ...]) -> int | None:
    """How many classes a stack's head gives; None: none, or its formula does not show it."""
    known = {**dict(shared), **dict(stack.modules)}
    for target, expression in stack.head.statements:
        if target == "classes":
            called = (n.func for n in ast.walk(expression) if isinstance(n, ast.Call))
            blocks = (known.get(f.id) for f in called if isinstance(f, ast.Name))
            sizes = (getattr(block, "outputs", None) for block in blocks)
            return next((size for size in sizes if size is not None), None)
    return None


@dataclass(frozen=True)
class AdapterSpec:
    """A LoRA adapter: an entry of `[adapters]`; a string is its `source`.

    Attributes:
        name: its key, by which requests name it.
        source: a folder of PEFT's or a GGUF file, as `weights` is named.
        merge: whether it is merged into the weights when they are loaded, for all requests.
    """

    name: str
    source: str
    merge: bool = False


def read_adapters(written: Any, path: str) -> tuple[AdapterSpec, ...]:
    """Reads the table. Raises `SpecError`."""
    found = []
    for name, entry in as_table(written, path, "adapters").items():
        key = f"adapters.{name}"
        given = {"source": entry} if isinstance(entry, str) else entry
        if not isinstance(given, Mapping):
            reason = f"{show_value(entry)} is not a source, or a table {{ source, merge }}"
            raise SpecError(path, key, reason)
        check_keys(given, ("source", "merge"), path, key)
        source, merge = given.get("source"), given.get("merge", False)
        if not isinstance(source, str) or not source:
            reason = f"{show_value(source)} is not the path of an adapter"
            raise SpecError(path, f"{key}.source", reason)
        if not isinstance(merge, bool):
            raise SpecError(path, f"{key}.merge", f"{show_value(merge)} is not true or false")
        found.append(AdapterSpec(name, source, merge))
    return tuple(found)


ToolCalls = Literal[
    "auto",
    "hermes",
    "qwen_coder",
    "llama",
    "mistral",
    "deepseek",
    "dsml",
    "granite",
    "phi",
    "command",
    "harmony",
]
Reasoning = Literal["auto", "none", "think", "mistral", "command", "seed"]


@dataclass(frozen=True)
class EngineSpec:
    """How the model is run: `[engine]`.

    Attributes:
        slots: sequences decoded in one batch.
        context: tokens a sequence may have; none: the model's own limit, at most 4096.
        kv_tokens: capacity of the KV cache in tokens, of all sequences together; none: as memory
            allows.
        state_snapshots: recurrent states kept for prefix reuse; none: as memory allows.
        cache_ram: GiB of host memory for cached prefixes that the KV cache has no room for; 0:
            none.
        cache_disk: a folder for cached prefixes, which are found again after a restart; none:
            there is none.
        cache_disk_size: GiB that may be in this folder; the least recently used leave.
        prefill_chunk: prompt tokens per step while no sequence decodes (chunked prefill).
        mixed_chunk: tokens of a step that mixes prefill with decoding.
        image_cache: GiB of host memory for the encoder's output for images, which requests with the
            same image share.
        queue: requests that may wait; none: any number.
        warm_up: whether all programs are compiled at start, rather than on first use.
        max_adapters: LoRA adapters that may be loaded at a time in addition to the model, those of
            `[adapters]` included; 0: those alone.
        max_adapter_rank: the highest rank that they may have; none: as high as those of
            `[adapters]` need, or 64.
        adapter_dtype: of their matrices in slots: "auto": as the computation's `dtype`, 16 bits on
            a CPU unless that is named; "int8": 8 bits, with a scale for each row of a rank.
        expert_adapters: whether there is room for terms of experts' matrices in them, which those
            of `[adapters]` are given if they have any.
        dora_adapters: whether there is room for DoRA's magnitudes in them, likewise.
    """

    slots: Size = 8
    context: Size | None = None
    kv_tokens: Size | None = None
    state_snapshots: Count | None = None
    cache_ram: NotNegative = 0.0
    cache_disk: str | None = None
    cache_disk_size: Positive = 16.0
    prefill_chunk: Size = 512
    mixed_chunk: Size = 96
    image_cache: NotNegative = 0.25
    queue: Size | None = None
    warm_up: bool = False
    max_adapters: Count = 0
    max_adapter_rank: Size | None = None
    adapter_dtype: Literal["auto", "int8"] = "auto"
    expert_adapters: bool = False
    dora_adapters: bool = False


@dataclass(frozen=True)
class PromptSpec:
    """How a conversation becomes a prompt: `[prompt]`.

    Attributes:
        template: in Inferflow's language, "{bos}[INST] {query} [/INST]".
        chat_template: in Jinja; without either, the checkpoint's own is used.
        fallback: in Jinja, for a checkpoint that has none of its own.
        system: a system message for conversations that have none.
        tool_calls: the model's tool-call format; "auto": that of its chat template.
        reasoning: the model's reasoning format; "auto": that of its chat template or vocabulary.
    """

    template: str | None = None
    chat_template: str | None = None
    fallback: str | None = None
    system: str | None = None
    tool_calls: ToolCalls = "auto"
    reasoning: Reasoning = "auto"


@dataclass(frozen=True)
class ModelSpec:
    """A resolved model specification.

    Attributes:
        path: the specification's file, or the checkpoint if a family was found for it.
        dims: the dimensions that were used, by name.
        shared: modules that belong to no stack: the token embedding, the vocabulary head.
        stacks: the encoder, the decoder, or both.
        tensors: the file's names for the parameters.
        dtype: of the computation; "auto": float32 on a CPU, bfloat16 elsewhere.
        trust_config: what to do about keys of the checkpoint that change the computation and that
            the specification does not follow: "refuse" the model, or only "warn".
        generation: defaults of `SamplingParams`.
        adapters: LoRA adapters that are loaded with the model.
        vision: the encoder of images, a model of its own with the only stack "vision"; None: the
            model reads no images.
        image: how images are read; None: the model reads text alone.
    """

    path: str
    dims: Mapping[str, Any]
    shared: tuple[tuple[str, Block], ...]
    stacks: tuple[StackSpec, ...]
    tensors: TensorMap
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    trust_config: Literal["refuse", "warn"] = "refuse"
    prompt: PromptSpec = PromptSpec()
    engine: EngineSpec = EngineSpec()
    quantization: QuantizationSpec = field(default_factory=QuantizationSpec)
    partition: PartitionSpec = field(default_factory=PartitionSpec)
    speculation: SpeculationSpec = field(default_factory=SpeculationSpec)
    classification: ClassificationSpec = field(default_factory=ClassificationSpec)
    generation: Mapping[str, Any] = field(default_factory=dict)
    adapters: tuple[AdapterSpec, ...] = ()
    vision: ModelSpec | None = None
    image: ImageSpec | None = None

    @property
    def decoder(self) -> StackSpec | None:
        return next((stack for stack in self.stacks if stack.name == "decoder"), None)

    @property
    def follows(self) -> FollowSpec | None:
        """The inputs from a target model, for a draft head; None: not a draft head."""
        return None if self.decoder is None else self.decoder.follows

    @property
    def generates(self) -> bool:
        """Whether a decoder's head gives logits: embedding models are often stored without one."""
        called = self.decoder.head.calls if self.decoder else ()
        blocks = (*self.shared, *(self.decoder.modules if self.decoder else ()))
        return any(isinstance(block, HeadSpec) and name in called for name, block in blocks)

    @property
    def type(self) -> str:
        """ "decoder-only", "encoder-only" or "encoder-decoder"."""
        names = sorted((stack.name for stack in self.stacks), reverse=True)
        return "-".join(names) if len(names) > 1 else f"{names[0]}-only"

    def _repr_html_(self) -> str:
        """HTML for a notebook: sizes and a drawing of the wiring."""
        from jinfer.modelspec.view.model_svg import spec_html

        return spec_html(self)

    @property
    def dynamic_factor(self) -> float:
        """The factor by which "dynamic" RoPE scaling can extend the trained context."""
        return max((scaling.factor for scaling in self._dynamic), default=1.0)

    @property
    def fixed_rope_length(self) -> int | None:
        """The length up to which keys do not depend on the sequence's length; None: any length."""
        lengths = (scaling.original_max_position_embeddings for scaling in self._dynamic)
        return min(lengths, default=None)

    @property
    def _dynamic(self) -> Iterator[RopeScalingSpec]:
        layers = (layer for stack in self.stacks for layer in stack.layers)
        ropes = (getattr(block, "position", None) for layer in layers for _, block in layer.modules)
        scalings = (rope.scaling for rope in ropes if isinstance(rope, RopeSpec) and rope.scaling)
        return (scaling for scaling in scalings if scaling.rope_type == "dynamic")
