"""Resolving a specification: its tables and a checkpoint's config to a `ModelSpec`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, dataclass, is_dataclass, replace
from typing import Any

from jinfer.modelspec.blocks import AnyBlock
from jinfer.modelspec.bounded_types import Size
from jinfer.modelspec.image_table import read_image
from jinfer.modelspec.model_spec import (
    EngineSpec,
    ModelSpec,
    PromptSpec,
    read_adapters,
    read_classification,
)
from jinfer.modelspec.partition_table import read_partition
from jinfer.modelspec.quantization_table import read_quantization
from jinfer.modelspec.spec_errors import SpecError, nearest_hint, show_value
from jinfer.modelspec.spec_values import KEY, MissingKey, SpecValues, no_rows
from jinfer.modelspec.speculation_table import read_speculation
from jinfer.modelspec.stack_spec import (
    check_called,
    check_tied,
    check_vocabulary,
    read_shared,
    read_stack,
    used_shared,
)
from jinfer.modelspec.table_reader import fields, read_value, union
from jinfer.modelspec.tensor_names import FORMATS, OmittedModule, TensorMap, read_tensor_map
from jinfer.modelspec.toml_tables import (
    as_table,
    check_keys,
    check_parameters,
    check_plain,
    check_text,
    check_texts,
    is_partial_override,
    merge,
    strings_in,
)

STACKS = ("encoder", "decoder")
VISION = "vision"
# Tables that define the model.
_MODEL_TABLES = ("dims", "modules", "image", *STACKS, VISION)
_TEXTS = ("family", "weights", "tokenizer", "mmproj", "description")
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
    tensors = read_tensor_map(_tensor_tables((base, *tables), False), facts.format, values)
    tensors = replace(tensors, omitted=omitted_modules(whole, tensors, values))
    vision = _vision(whole[VISION], (base, *tables), facts, path) if VISION in whole else None
    dtype = _enumerated("dtype", whole, values)
    if vision is not None:
        vision = replace(vision, dtype=dtype)
        tensors = replace(tensors, ignore=(*tensors.ignore, *vision.tensors.patterns))
    _check_dims(tables, base, values)
    sizes = {name: values.dim(name, "dims") for name in sorted(values.used)}
    for stack in built:
        if stack.name == "decoder" and stack.follows is None and "vocab" in sizes:
            check_vocabulary(stack, shared, sizes["vocab"], path)
    if "context" in values.dims:  # often no block uses it, and nothing else checks it
        sizes["context"] = read_value(Size | None, values.dims["context"], values, "dims.context")
    spec = ModelSpec(
        path=path,
        dims=sizes,
        shared=tuple(shared.items()),
        stacks=tuple(built),
        tensors=tensors,
        dtype=dtype,
        trust_config=_enumerated("trust_config", whole, values),
        prompt=_prompt(whole.get("prompt", {}), values),
        engine=engine,
        quantization=read_quantization(whole.get("quantization", {}), values),
        partition=read_partition(whole.get("partition", {}), values),
        speculation=read_speculation(whole.get("speculation", {}), values),
        classification=read_classification(whole.get("classification", {}), values),
        generation=whole.get("generation", {}),
        image=read_image(whole.get("image", {}), values),
        adapters=read_adapters(whole.get("adapters", {}), path),
        vision=vision,
    )
    check_lost_keys(lost, whole, spec, values)
    return spec


def _vision(
    table: Mapping[str, Any],
    tables: Sequence[Mapping[str, Any]],
    facts: CheckpointFacts,
    path: str,
) -> ModelSpec:
    """The encoder of images, `[vision]`, which has dimensions of its own.

    Args:
        table: the merged table.
        tables: the specification's tables.
    """
    dims = as_table(table.get("dims", {}), path, f"{VISION}.dims")
    values = SpecValues(path, dims, facts.lookup, facts.has, facts.source, facts.row_count)
    stack, _ = read_stack(VISION, table, {}, values)
    tensors = read_tensor_map(_tensor_tables(tables, True), facts.format, values)
    parts = [part for each in tables for part in (each, each.get(facts.format, {}))]
    named = [{"tensors": each.get("tensors", {}), **each.get(VISION, {})} for each in parts]
    _check_dims(named, {}, values)
    sizes = {name: values.dim(name, "dims") for name in sorted(values.used)}
    return ModelSpec(path, sizes, (), (stack,), tensors)


def _tensor_tables(tables: Sequence[Mapping[str, Any]], vision: bool) -> list[Mapping[str, Any]]:
    """The tables `[tensors]` of the encoder of images, or of the other parameters.

    Of the former the prefixes and what to ignore are "vision.prefix" and "vision.ignore".
    """

    def of_part(table: Any) -> Any:
        if not isinstance(table, Mapping):
            return table
        kept = {}
        for name, written in table.items():
            if name in FORMATS:
                kept[name] = of_part(written)
            elif vision is name.startswith(f"{VISION}."):
                bare = name.removeprefix(f"{VISION}.")
                kept[bare if bare in ("prefix", "ignore") else name] = written
        return kept

    return [of_part(table.get("tensors", {})) for table in tables]


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


def omitted_modules(
    merged: Mapping[str, Any], tensors: TensorMap, values: SpecValues
) -> tuple[OmittedModule, ...]:
    """The modules whose condition is false and that `[tensors]` has names for.

    Args:
        merged: a specification's merged tables.
    """
    found = []
    for stack in ("", "encoder.", "decoder."):
        table = merged.get(stack.rstrip("."), {}) if stack else merged
        for name, module in table.get("modules", {}).items():
            when = module.get("when") if isinstance(module, Mapping) else None
            key = f"{stack}modules.{name}.when"
            if isinstance(when, str) and _is_false(when, key, values):
                owned = (f"{stack}{name}", f"{stack}{{i}}.{name}")
                names = tuple(name for each in owned for name in _names(each, tensors))
                found += [OmittedModule(key, when, names)] if names else []
    return tuple(found)


def _is_false(when: str, key: str, values: SpecValues) -> bool:
    try:
        return not read_value(bool, when, values, key)
    except SpecError:  # it depends on the layer
        return False


def _names(module: str, tensors: TensorMap) -> Iterator[str]:
    for pattern, entry in tensors.entries:
        if pattern == module or pattern.startswith(f"{module}."):
            yield from entry.names


_BUILT = ("modules", "encoder", "decoder")


@dataclass(frozen=True)
class LostKey:
    """A key of a replaced table that the new table does not have.

    Attributes:
        path: ("decoder", "modules", "attn", "position", "pairs").
        value: its value as written.
        kind: the new kind.
    """

    path: tuple[str, ...]
    value: Any
    kind: Any


def lost_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[LostKey]:
    """The keys of modules that are lost when `new` is merged over `old`."""
    for name in _BUILT:
        if isinstance(old.get(name), Mapping) and isinstance(new.get(name), Mapping):
            yield from _lost((name,), old[name], new[name], None)


def _lost(
    path: tuple[str, ...], old: Mapping[str, Any], new: Mapping[str, Any], kind: Any
) -> Iterator[LostKey]:
    """Those below `path`; `kind` is that of the replacing table, None if nothing replaced it."""
    for key, value in old.items():
        over = new.get(key)
        if isinstance(value, Mapping) and isinstance(over, Mapping):
            changed = kind if is_partial_override(value, over) else over["kind"]
            yield from _lost((*path, key), value, over, changed)
        elif key not in new and kind is not None and key not in ("kind", "when"):
            yield LostKey((*path, key), value, kind)


def check_lost_keys(
    lost_keys: Iterable[LostKey], merged: Mapping[str, Any], spec: ModelSpec, values: SpecValues
) -> None:
    """Raises `SpecError` for a lost key that the new module also has, with another value.

    Args:
        merged: the merged tables.
        spec: the specification resolved from them.
    """
    for lost in lost_keys:
        if _is_written(lost.path, merged):
            continue
        for block in _blocks(lost.path, spec):
            _check(lost, block, values)


def _is_written(path: tuple[str, ...], table: Any) -> bool:
    for part in path:
        if not isinstance(table, Mapping) or part not in table:
            return False
        table = table[part]
    return True


def _blocks(path: tuple[str, ...], spec: ModelSpec) -> Iterator[Any]:
    """The blocks built from the table that contained a key."""
    stack, modules = (path[0], path[1:]) if path[0] != "modules" else ("", path)
    if (
        modules[0] != "modules" or len(modules) < 3
    ):  # a variant: its base table is in the same table
        return
    _, name, *inner = modules[:-1]
    groups = [spec.shared] if not stack else []
    for each in spec.stacks:
        if each.name == stack:
            groups += [each.modules, *(layer.modules for layer in each.layers)]
    for block in {id(b): b for group in groups for n, b in group if n == name}.values():
        part: Any = block
        for step in inner:
            part = getattr(part, step, None)
        if is_dataclass(part):
            yield part


def _check(lost: LostKey, block: Any, values: SpecValues) -> None:
    name, cls = lost.path[-1], block.__class__
    if name not in fields(cls):
        return
    field, hint = fields(cls)[name]
    key, now = ".".join(lost.path), getattr(block, name)
    if "dim" in field.metadata:
        usual = values.dim(field.metadata["dim"], key)
    else:
        usual = None if field.default is MISSING else field.default
    if now != usual:  # a variant sets it
        return
    try:
        before = read_value(hint, lost.value, values, key)
        same = replace(block, **{name: before}) == block
    except SpecError:  # the value is invalid for the new kind
        return
    if not same:
        raise SpecError(
            values.path,
            key,
            f"was {show_value(before)}, but kind = {show_value(lost.kind)} replaces the module and "
            f"leaves it behind, so it would be {show_value(now)}; say which it is",
        )


_MATCH_KEYS = ("architectures", "gguf", "llama2c", "when")


def check_match(table: Any, path: object) -> None:
    """Raises `SpecError` unless `table` is a valid `[match]` table."""
    check_keys(table, _MATCH_KEYS, path, "match")
    for key in ("architectures", "gguf"):
        check_texts(table.get(key, []), path, f"match.{key}")
    if not isinstance(table.get("llama2c", False), bool):
        raise SpecError(
            path, "match.llama2c", f"{show_value(table['llama2c'])} is not true or false"
        )
    check_text(table.get("when", ""), path, "match.when")


def matches(
    table: Mapping[str, Any],
    path: object,
    *,
    format: str,
    architectures: Set[str],
    lookup: Callable[[str], Any],
    has: Callable[[str], bool],
    rows: Callable[[str], int],
) -> bool:
    """Whether a family matches a checkpoint.

    Args:
        table: the family's `[match]`.
        architectures: the checkpoint's architecture names.
        lookup, has, rows: as in `SpecValues`.

    Raises:
        SpecError: an invalid table.
    """
    check_match(table, path)
    if format == "llama2c":
        return bool(table.get("llama2c", False))
    names = check_texts(table.get("gguf" if format == "gguf" else "architectures", []), path, "")
    if architectures.isdisjoint(names):
        return False
    if "when" not in table:
        return True

    def or_false(find: Callable[[str], Any]) -> Callable[[str], Any]:
        """In a condition, a missing key or tensor counts as false."""

        def found(name: str) -> Any:
            try:
                return find(name)
            except MissingKey:
                return False

        return found

    values = SpecValues(path, {}, or_false(lookup), has, row_count=or_false(rows))
    return bool(values.value(table["when"], "match.when"))
