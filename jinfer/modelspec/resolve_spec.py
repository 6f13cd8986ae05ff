"""Resolving a specification: its tables and a checkpoint's config to a `ModelSpec`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinfer.modelspec.adapters_table import read_adapters
from jinfer.modelspec.blocks import AnyBlock
from jinfer.modelspec.bounded_types import Size
from jinfer.modelspec.classification_table import read_classification
from jinfer.modelspec.family_match import check_match
from jinfer.modelspec.model_spec import EngineSpec, ModelSpec, PromptSpec
from jinfer.modelspec.omitted_modules import omitted_modules
from jinfer.modelspec.override_conflicts import LostKey, check_lost_keys, lost_keys
from jinfer.modelspec.partition_table import read_partition
from jinfer.modelspec.quantization_table import read_quantization
from jinfer.modelspec.spec_errors import SpecError, nearest_hint, show_value
from jinfer.modelspec.spec_values import KEY, MissingKey, SpecValues, no_rows
from jinfer.modelspec.speculation_table import read_speculation
from jinfer.modelspec.stack_spec import (
    check_called,
    check_tied,
    read_shared,
    read_stack,
    used_shared,
)
from jinfer.modelspec.table_reader import fields, read_value, union
from jinfer.modelspec.tensor_names import FORMATS, read_tensor_map
from jinfer.modelspec.toml_tables import (
    as_table,
    check_keys,
    check_parameters,
    check_plain,
    check_text,
    merge,
    strings_in,
)

STACKS = ("encoder", "decoder")
_MODEL_TABLES = ("dims", "modules", *STACKS)  # tables that define the model
_TEXTS = ("family", "weights", "tokenizer", "description")
_SETTINGS = (
    *("dtype", "prompt", "engine", "quantization", "partition", "speculation"),
    *("classification", "generation", "adapters"),
)
_TRUST = ("trust", "trust_config")
TOP_KEYS = (
    *_TEXTS,
    *_TRUST,
    "parameters",
    *_MODEL_TABLES,
    *FORMATS,
    "match",
    "tensors",
    *_SETTINGS,
)


@dataclass(frozen=True)
class CheckpointFacts:
    """What a checkpoint says of itself.

    Attributes:
        format: the checkpoint's format.
        lookup: `$key` -> value; raises `MissingKey`.
        has: whether it has a tensor that matches a glob pattern.
        source: name of the file with the keys, for errors.
        row_count: number of rows of the tensor that matches a pattern; raises `MissingTensor`.
    """

    format: str = "safetensors"
    lookup: Callable[[str], Any] = lambda key: _no_key(key)
    has: Callable[[str], bool] = lambda pattern: False
    source: str = "the checkpoint"
    row_count: Callable[[str], int] = no_rows


def _no_key(key: str) -> Any:
    raise MissingKey(key)


def resolve(
    tables: Sequence[Mapping[str, Any]], path: str, facts: CheckpointFacts, base: Mapping[str, Any]
) -> ModelSpec:
    """Resolves a specification.

    Args:
        tables: its tables, from the most general (family) to the most specific (overrides).
        path: its file, for errors.
        facts: the checkpoint it is resolved for.
        base: defaults of the checkpoint's format.

    Raises:
        SpecError: an unknown key, a value of a wrong type, an undefined name, or a module that is
            never called.
    """
    for table in (base, *tables):
        _check_shape(table, path)
    whole, lost = merge(merge(tables[0], base), tables[0].get(facts.format, {})), list[LostKey]()
    for over in (part for table in tables[1:] for part in (table, table.get(facts.format, {}))):
        lost += lost_keys(whole, over)
        whole = merge(whole, over)
    dims = whole.get("dims", {})
    values = SpecValues(path, dims, facts.lookup, facts.has, facts.source, facts.row_count)
    table = as_table(whole.get("engine", {}), path, "engine")
    engine = read_value(EngineSpec, table, values, "engine")
    values.engine_context = engine.context
    stacks = [name for name in STACKS if name in whole]
    if not stacks:
        raise SpecError(path, "", "has neither [encoder] nor [decoder]; name a family or write one")
    shared, absent = read_shared(whole.get("modules", {}), values)
    built, called = [], set[str]()
    for name in stacks:
        encoded = name == "decoder" and "encoder" in whole
        stack, shared_calls = read_stack(name, whole[name], shared, values, absent, encoded)
        built.append(stack)
        called |= shared_calls
    own = _own_modules(tables, facts.format)
    check_called([name for name in shared if name in own], called, path, "modules")
    shared = used_shared(shared, built)
    for stack in built:
        check_tied(stack, shared, path)
    tensors = read_tensor_map(
        [layer.get("tensors", {}) for layer in (base, *tables)], facts.format, values
    )
    tensors = replace(tensors, omitted=omitted_modules(whole, tensors, values))
    _check_dims(tables, base, values)
    sizes = {name: values.dim(name, "dims") for name in sorted(values.used)}
    if "context" in values.dims:  # often no block uses it, and nothing else checks it
        sizes["context"] = read_value(Size | None, values.dims["context"], values, "dims.context")
    spec = ModelSpec(
        path=path,
        dims=sizes,
        shared=tuple(shared.items()),
        stacks=tuple(built),
        tensors=tensors,
        dtype=_enumerated("dtype", whole, values),
        trust_config=_enumerated("trust_config", whole, values),
        prompt=_prompt(whole.get("prompt", {}), values),
        engine=engine,
        quantization=read_quantization(whole.get("quantization", {}), values),
        partition=read_partition(whole.get("partition", {}), values),
        speculation=read_speculation(whole.get("speculation", {}), values),
        classification=read_classification(whole.get("classification", {}), values),
        generation=whole.get("generation", {}),
        adapters=read_adapters(whole.get("adapters", {}), path),
    )
    check_lost_keys(lost, whole, spec, values)
    return spec


def _enumerated(name: str, merged: Mapping[str, Any], values: SpecValues) -> Any:
    """A top-level key that is one of a few words."""
    field, hint = fields(ModelSpec)[name]
    return read_value(hint, merged.get(name, field.default), values, name)


def _prompt(table: Mapping[str, Any], values: SpecValues) -> PromptSpec:
    """`[prompt]`: the types were checked, but not the values of its enumerations."""
    types = {name: type_ for name, (_, type_) in fields(PromptSpec).items()}
    named = [name for name in ("tool_calls", "reasoning") if name in table]
    words = {n: read_value(types[n], table[n], values, f"prompt.{n}") for n in named}
    return PromptSpec(**{**table, **words})


def _own_modules(tables: Sequence[Mapping[str, Any]], format: str) -> set[str]:
    """Shared modules that a specification names; those of its format need not be called."""
    parts = [part for table in tables for part in (table, table.get(format, {}))]
    return {name for part in parts for name in part.get("modules", {})}


def _check_shape(table: Mapping[str, Any], path: str) -> None:
    """Checks the keys and types of a specification's tables, independent of the checkpoint."""
    check_plain(table, path)
    check_keys(table, TOP_KEYS, path, "")
    check_match(table.get("match", {}), path)
    for name in _TEXTS:
        check_text(table.get(name, ""), path, name)
    check_parameters(table.get("parameters", "1B"), path)
    if not isinstance(table.get("trust", False), bool):
        raise SpecError(path, "trust", f"{show_value(table['trust'])} is not true or false")
    for name, text in check_keys(
        table.get("prompt", {}), fields(PromptSpec), path, "prompt"
    ).items():
        check_text(text, path, f"prompt.{name}")
    as_table(table.get("generation", {}), path, "generation")
    for format in FORMATS:
        check_keys(table.get(format, {}), _MODEL_TABLES, path, format)
    for prefix, part in (("", table), *((f"{f}.", table.get(f, {})) for f in FORMATS)):
        for name in _MODEL_TABLES:
            as_table(part.get(name, {}), path, prefix + name)
        for name, value in part.get("dims", {}).items():
            if not isinstance(value, int | float | str):
                reason = f"{show_value(value)} is not a number or the text of an expression"
                raise SpecError(path, f"{prefix}dims.{name}", reason)


def _check_dims(
    tables: Sequence[Mapping[str, Any]], base: Mapping[str, Any], values: SpecValues
) -> None:
    """Rejects unused dimensions, most likely misspelt, unless blocks have them as defaults.

    A use in any table counts: the parent of a family may have sizes for other blocks.
    """
    named = {"layers", *values.used}
    for block in union(AnyBlock):
        known = [field.metadata.get("dim") for field in dataclasses.fields(block)]
        named |= {name for name in known if name is not None}
    dims = [table.get("dims", {}) for table in (base, *tables)]
    texts = [text for table in dims for name in named for text in strings_in(table.get(name))]
    for table in (base, *tables):
        parts = [table[key] for key in table if key not in ("dims", "description")]
        texts += [text for part in parts for text in strings_in(part)]
    while texts:
        words = {w for text in texts for w in re.findall(r"\w+", re.sub(KEY, "", text))} - named
        named |= words
        texts = [text for word in words for table in dims for text in strings_in(table.get(word))]
    for name in (name for table in tables for name in table.get("dims", {})):
        if name not in named:
            allowed = nearest_hint(name, named & values.dims.keys())
            raise SpecError(values.path, f"dims.{name}", f"is used nowhere; {allowed}")
