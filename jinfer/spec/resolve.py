"""From a specification's tables and a checkpoint's own words to a `ModelSpec`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from jinfer.spec.blocks import Block
from jinfer.spec.errors import SpecError, nearest
from jinfer.spec.formula import Formula, compile_formula
from jinfer.spec.model import EngineSpec, LayerSpec, ModelSpec, PromptSpec, StackSpec
from jinfer.spec.reader import read
from jinfer.spec.tensors import FORMATS, read_tensor_map
from jinfer.spec.values import Missing, Values

STACKS = ("encoder", "decoder")
_TOP = {
    *("family", "weights", "tokenizer", "description", "match", "dims", "modules", "tensors"),
    *("dtype", "prompt", "engine", "generation", *STACKS, *FORMATS),
}
_STACK = ("layers", "stem", "layer", "head", "modules", "variants", "pattern")
_STEM_INPUTS = ("tokens", "positions")


@dataclass(frozen=True)
class Facts:
    """What a checkpoint says of itself.

    Attributes:
        format: the checkpoint's format.
        lookup: `$key` -> value; raises `Missing`.
        has: whether it has a tensor that matches a glob pattern.
        source: where the keys come from, for errors.
    """

    format: str = "safetensors"
    lookup: Callable[[str], Any] = lambda key: _no_key(key)
    has: Callable[[str], bool] = lambda pattern: False
    source: str = "the checkpoint"


def _no_key(key: str) -> Any:
    raise Missing(key)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid onto `base`, table by table; a table of another `kind` replaces the whole."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        same = isinstance(old, Mapping) and isinstance(value, Mapping)
        if same and value.get("kind", old.get("kind")) == old.get("kind"):
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged


def resolve(
    tables: Sequence[Mapping[str, Any]], path: str, facts: Facts, base: Mapping[str, Any]
) -> ModelSpec:
    """Resolves a specification.

    Args:
        tables: its tables, from the most general (family) to the most specific (overrides).
        path: its file, for errors.
        facts: the checkpoint it is resolved for.
        base: what holds for every checkpoint of that format unless a table says otherwise.

    Raises:
        SpecError: for an unknown key, a value of a wrong type, a name that stands for nothing, a
            module that is never used.
    """
    for table in tables:
        _check_keys(table, _TOP, path, "")
    whole = merge(merge(tables[0], base), tables[0].get(facts.format, {}))
    for table in tables[1:]:
        whole = merge(merge(whole, table), table.get(facts.format, {}))
    values = Values(path, _tables(whole, "dims", path), facts.lookup, facts.has, facts.source)
    stacks = [name for name in STACKS if name in whole]
    if not stacks:
        raise SpecError(path, "", "has neither [decoder] nor [encoder]; name a family or write one")
    shared = {
        name: read(Block, table, values, f"modules.{name}")
        for name, table in _tables(whole, "modules", path).items()
    }
    built = tuple(_stack(name, whole[name], shared, values) for name in stacks)
    _check_used(shared, [formula for stack in built for formula in _formulas(stack)], path, "")
    _check_dims(tables, whole, values)
    if "context" in values.dims:
        values.dim("context", "dims")
    return ModelSpec(
        path=path,
        dims={name: values.dim(name, "dims") for name in sorted(values.used)},
        shared=tuple(shared.items()),
        stacks=built,
        tensors=read_tensor_map(
            [layer.get("tensors", {}) for layer in (base, *tables)], facts.format, values
        ),
        dtype=read(get_type_hints(ModelSpec)["dtype"], whole.get("dtype", "auto"), values, "dtype"),
        prompt=_texts(PromptSpec, whole.get("prompt", {}), path),
        engine=read(EngineSpec, whole.get("engine", {}), values, "engine"),
        generation=_tables(whole, "generation", path),
    )


def _texts(cls: Any, table: Any, path: str) -> Any:
    """A table of plain texts; they are not expressions: a template may hold any character."""
    allowed = [field.name for field in fields(cls)]
    _check_keys(table, allowed, path, "prompt")
    for name, text in table.items():
        if not isinstance(text, str):
            raise SpecError(path, f"prompt.{name}", f"{text!r} is not a text")
    return cls(**table)


def _tables(whole: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    table = whole.get(name, {})
    if not isinstance(table, Mapping):
        raise SpecError(path, name, f"{table!r} is not a table")
    return table


def _check_keys(table: Any, allowed: Iterable[str], path: str, key: str) -> None:
    if not isinstance(table, Mapping):
        raise SpecError(path, key, f"{table!r} is not a table")
    for name in table:
        if name not in allowed:
            where = f"{key}.{name}" if key else name
            raise SpecError(path, where, f"unknown key; {nearest(name, allowed)}")


def _check_dims(
    tables: Sequence[Mapping[str, Any]], whole: Mapping[str, Any], values: Values
) -> None:
    """A dimension that nothing uses is most likely a misspelt one."""
    mentioned = set(re.findall(r"\w+", " ".join(_strings(whole))))
    for table in tables:
        for name in table.get("dims", {}):
            if name not in values.used and name not in mentioned and name != "context":
                raise SpecError(
                    values.path, f"dims.{name}", f"is used nowhere; {nearest(name, values.used)}"
                )


def _strings(table: Any) -> Iterator[str]:
    if isinstance(table, str):
        yield table
    elif isinstance(table, Mapping):
        for value in table.values():
            yield from _strings(value)
    elif isinstance(table, list):
        for value in table:
            yield from _strings(value)


def _stack(
    name: str, table: Mapping[str, Any], shared: Mapping[str, Block], values: Values
) -> StackSpec:
    path = str(values.path)
    _check_keys(table, _STACK, path, name)
    count = read(int, table.get("layers", "layers"), values, f"{name}.layers")
    if not 0 <= count <= 10000:
        raise SpecError(path, f"{name}.layers", f"{count} is not a number of layers")
    variants = _tables(table, "variants", path)
    for variant, changes in variants.items():
        _check_keys(changes, ("layer", "modules"), path, f"{name}.variants.{variant}")
    base = {"layer": table.get("layer"), "modules": table.get("modules", {})}
    merged = {variant: merge(base, changes) for variant, changes in variants.items()} or {"": base}
    compile_ = _Compiler(values, name, shared, count)
    outer = _OuterModules(values, name, table.get("modules", {}))
    stem = compile_(table.get("stem"), "stem", _STEM_INPUTS, outer)
    head = compile_(table.get("head"), "head", ("x",), outer)
    layers = {
        variant: compile_.layer(content, variant)
        for variant, content in merged.items()
    }
    order = _pattern(table.get("pattern"), count, list(merged), values, f"{name}.pattern")
    modules = {called: outer[called] for called in (*stem.calls, *head.calls) if called not in shared}
    stack = StackSpec(name, stem, tuple(layers[v] for v in order), head, tuple(modules.items()))
    declared = {m for content in merged.values() for m in content["modules"]}
    used = [stem, head, *(layer.wiring for layer in layers.values())]
    _check_used(declared, used, path, f"{name}.")
    return stack


def _formulas(stack: StackSpec) -> list[Formula]:
    return [stack.stem, stack.head, *(layer.wiring for layer in stack.layers)]


def _check_used(declared: Iterable[str], formulas: list[Formula], path: str, where: str) -> None:
    called = {name for formula in formulas for name in formula.calls}
    for name in declared:
        if name not in called:
            raise SpecError(
                path,
                f"{where}modules.{name}",
                f"is declared, but no formula calls it; {nearest(name, called)}",
            )


class _OuterModules(dict[str, Block]):
    """Modules of a stack's table, read when they are asked for."""

    def __init__(self, values: Values, stack: str, table: Mapping[str, Any]) -> None:
        super().__init__()
        self._values, self._stack, self.table = values, stack, table

    def __missing__(self, name: str) -> Block:
        key = f"{self._stack}.modules.{name}"
        self[name] = read(Block, self.table[name], self._values, key)
        return self[name]


@dataclass(frozen=True)
class _Compiler:
    values: Values
    stack: str
    shared: Mapping[str, Block]
    count: int

    def __call__(
        self, text: Any, part: str, inputs: Sequence[str], modules: _OuterModules
    ) -> Formula:
        key = f"{self.stack}.{part}"
        if text is None:
            raise SpecError(self.values.path, key, "is missing; write the formula")
        return compile_formula(
            text,
            path=self.values.path,
            key=key,
            inputs=inputs,
            modules=dict.fromkeys([*self.shared, *modules.table], 1),
            constant=lambda name: self._constant(name, key),
        )

    def layer(self, content: Mapping[str, Any], variant: str) -> LayerSpec:
        part = f"variants.{variant}.layer" if variant else "layer"
        modules = _OuterModules(self.values, self.stack, content["modules"])
        wiring = self(content["layer"], part, ("x", "tokens", "positions"), modules)
        own = tuple((name, modules[name]) for name in wiring.calls if name not in self.shared)
        return LayerSpec(wiring, own)

    def _constant(self, name: str, key: str) -> float | None:
        if name == "layers":
            return self.count
        if name not in self.values.dims:
            return None
        number = self.values.dim(name, key)
        return number if isinstance(number, (int, float)) else None


def _pattern(
    written: Any, count: int, variants: list[str], values: Values, key: str
) -> list[str]:
    """The variant of each layer: a list that is repeated, or an expression of the layer's i."""
    if written is None:
        if len(variants) > 1:
            raise SpecError(values.path, key, "is missing: which layer is which variant?")
        return variants * count
    names = {name: name for name in variants}
    chosen = []
    for i in range(count):
        if isinstance(written, str):
            scope = Values(
                values.path, values.dims, values.lookup, values.has, values.source,
                {**names, "i": i, "layers": count}, values.used,
            )  # fmt: skip
            value = scope.value(written, key)
        else:
            value = written
        if isinstance(value, list) and value:
            value = value[i % len(value)]
        if value not in names:
            raise SpecError(
                values.path, key, f"layer {i} would be {value!r}; {nearest(str(value), variants)}"
            )
        chosen.append(value)
    return chosen
