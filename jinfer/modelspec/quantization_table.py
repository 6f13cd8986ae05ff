"""Quantization settings (`[quantization]`): storage of weights and of the KV cache."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from jinfer.modelspec.bounded_types import Count, NotNegative
from jinfer.modelspec.spec_errors import SpecError, show_value
from jinfer.modelspec.spec_values import SpecValues
from jinfer.modelspec.table_reader import read_value
from jinfer.modelspec.toml_tables import as_table
from jinfer.quant_format import parse_cache_dtype, parse_format

AUTO, PLAIN = "auto", "plain"
_OLD_METHODS = {"nearest": "rtn", "search": "mse", "feedback": "gptq"}  # accepted with a note
_MOST_OUTLIERS = 0.1  # above, a wider format takes less memory
_BUDGET = re.compile(r"(\d+(?:\.\d+)?) ?bits?")
_TABLE_FORMAT = parse_format("q6")  # minimum for embeddings and heads, unless they are set
_log = logging.getLogger("jinfer")

# Use of a parameter, which determines how it may be stored: a "matrix" and a "head" (which gives
# logits) are only multiplied with, rows of a "table" are looked up, "plain" is everything else.
Role = Literal["plain", "matrix", "table", "head"]


@dataclass(frozen=True)
class RuleSpec:
    """An exception for some weights: one of `[quantization] rules`.

    Attributes:
        match: pattern for names of parameters, such as "decoder.*.attn.v"; the first rule that
            matches counts.
        weights: as `weights` of `[quantization]`.
        outliers: as `outliers` of `[quantization]`; none: the same.
    """

    match: str
    weights: str
    outliers: NotNegative | None = None

    def check(self) -> tuple[str, str] | None:
        """The first invalid value: its key and the reason."""
        return _wrong_share(self.outliers) or _wrong_format("weights", self.weights)


@dataclass(frozen=True)
class QuantizationSpec:
    """How weights and the KV cache are stored: `[quantization]`.

    Attributes:
        weights: a format such as "q4", "q3.5", "q4_b64_sym"; "plain": numbers of the computation's
            type; "4.25 bits": each matrix, embedding and head in as many bits as serves the
            predictions best if a weight takes so many on average, with scales and padding;
            "auto": as in the file: GGUF's blocks, and on a CPU 16-bit numbers too if the
            computation's type is wider; everything else as "plain".
        embedding: the same for embedding tables; none: as `weights`, but at least "q6" unless that
            is a number of bits.
        head: the same for the vocabulary head; none: as `embedding`. A tied head is the embedding.
        rules: exceptions, the first that matches counts; one that matches nothing is an error.
        threshold: matrices of fewer weights are not quantized.
        outliers: fraction of the weights that are stored exactly, apart from the others.
        method: "rtn" rounds to nearest, "mse" minimizes the squared error of each block, "gptq"
            that of a layer's outputs, which takes a minute or more, once, and is cached; "auto":
            "gptq" for models that generate text, if it takes some minutes at most.
        activations: of matrix products on a CPU: "int8" rounds them to 8 bits in blocks of 32 with
            quantized weights, to bfloat16 with bfloat16 weights, or to 14 bits with float16
            weights, where that is the processor's faster way; "int16" rounds to 16 bits with
            quantized weights alone, and "float" keeps float32's 24 bits; "bf16" is "int8", but
            rounds 33 rows and more to bfloat16 on processors with AMX, and quantized weights too:
            prompts take a fraction of the instructions, and a token may depend on the company in
            which its prompt is computed; "auto": "float" if `dtype` is float32, else "int8".
        kv_cache: "f32", "bf16", "f16", or the width of keys and values, such as "q8"; "auto": the
            computation's type, or on a CPU "f16" if `dtype` is "auto" too.
    """

    weights: str = AUTO
    embedding: str | None = None
    head: str | None = None
    rules: tuple[RuleSpec, ...] = ()
    threshold: Count = 4096
    outliers: NotNegative = 0.0
    method: Literal["auto", "rtn", "mse", "gptq"] = "auto"
    activations: Literal["auto", "int8", "int16", "float", "bf16"] = "auto"
    kv_cache: str = AUTO

    @property
    def budget(self) -> float | None:
        """Bits of a weight, if `weights` is their number."""
        match = _BUDGET.fullmatch(self.weights)
        return float(match[1]) if match else None

    def check(self) -> tuple[str, str] | None:
        """The first invalid value: its key and the reason."""
        if wrong := _wrong_share(self.outliers):
            return wrong
        named = {"embedding": self.embedding, "head": self.head}
        if self.budget is None:
            named["weights"] = self.weights
        for key, name in named.items():
            if name is not None and (wrong := _wrong_format(key, name)):
                bits = ', or a number of bits, such as "4.25 bits"' if key == "weights" else ""
                return key, wrong[1] + bits
        try:
            parse_cache_dtype(self.kv_cache if self.kv_cache != AUTO else "f32")
        except ValueError as error:
            return "kv_cache", f'{error}; or "auto"'
        return None


def _wrong_share(outliers: float | None) -> tuple[str, str] | None:
    if outliers is not None and outliers > _MOST_OUTLIERS:
        return "outliers", f"{outliers} is not a share from 0 to {_MOST_OUTLIERS}"
    return None


def _wrong_format(key: str, name: str) -> tuple[str, str] | None:
    if name in (AUTO, PLAIN):
        return None
    try:
        parse_format(name)
    except ValueError as error:
        return key, f'{error}; or "auto", or "plain"'
    return None


def current_method[T](name: T) -> str | T:
    """Translates an earlier version's word for a method, with a note; leaves other values alone."""
    if not isinstance(name, str) or name not in _OLD_METHODS:
        return name
    _log.warning('quantization.method: "%s" is now called "%s"', name, _OLD_METHODS[name])
    return _OLD_METHODS[name]


def read_quantization(written: Any, values: SpecValues) -> QuantizationSpec:
    """Reads the table. Raises `SpecError`."""
    table = dict(as_table(written, values.path, "quantization"))
    if "method" in table:
        table["method"] = current_method(table["method"])
    rules = table.pop("rules", [])
    if not isinstance(rules, list | tuple):
        reason = f"{show_value(rules)} is not a list of tables {{ match = ..., weights = ... }}"
        raise SpecError(values.path, "quantization.rules", reason)
    spec = read_value(QuantizationSpec, table, values, "quantization")
    return replace(
        spec,
        rules=tuple(
            read_value(RuleSpec, as_table(rule, values.path, key), values, key)
            for key, rule in ((f"quantization.rules[{i}]", rule) for i, rule in enumerate(rules))
        ),
    )


def default_format(spec: QuantizationSpec, role: Role) -> str:
    """The format of a weight that no rule matches."""
    if role == "table" and spec.embedding is not None:
        return spec.embedding
    if role == "head" and (named := spec.head or spec.embedding) is not None:
        return named
    if role == "matrix" or spec.weights in (AUTO, PLAIN) or spec.budget is not None:
        return spec.weights
    wide = parse_format(spec.weights).bits_per_weight >= _TABLE_FORMAT.bits_per_weight
    return spec.weights if wide else _TABLE_FORMAT.name
