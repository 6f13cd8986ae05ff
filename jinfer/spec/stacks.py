"""From a stack's table to a `StackSpec`: formulas, modules, which layer is which variant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jinfer.spec import formula
from jinfer.spec.blocks import LOOKUPS, Attention, Block, Embedding, Head
from jinfer.spec.bounds import Layers
from jinfer.spec.errors import SpecError, nearest, show
from jinfer.spec.formula import Formula, Sort, compile_formula
from jinfer.spec.model import LayerSpec, StackSpec
from jinfer.spec.reader import read
from jinfer.spec.tables import Table, as_table, check_keys, merge
from jinfer.spec.values import Values

STACK_KEYS = ("layers", "stem", "layer", "head", "modules", "variants", "pattern")
# Parts of the tree that modules stand in, which the names of parameters leave out.
RESERVED = ("shared", "stacks", "layers", "modules", "value")
_INPUTS: dict[str, dict[str, Sort]] = {
    "stem": {"tokens": "indices", "positions": "indices"},
    "layer": {"x": "vectors", "tokens": "indices", "positions": "indices"},
    "head": {"x": "vectors"},
}


def read_shared(table: Mapping[str, Any], values: Values) -> dict[str, Block]:
    """Reads `[modules]`, which every stack may call. Raises `SpecError`."""
    _check_names(table, "modules", values.path)
    shared = {name: read(Block, table[name], values, f"modules.{name}") for name in table}
    for name, block in shared.items():
        if isinstance(block, Attention):
            raise SpecError(values.path, f"modules.{name}", "belongs to the layers of a stack")
    return shared


def read_stack(
    name: str, table: Any, shared: Mapping[str, Block], values: Values
) -> tuple[StackSpec, set[str]]:
    """Reads a stack; returns it and the shared modules that its formulas call.

    Raises:
        SpecError: for an unknown key, a formula or module that is wrong, a module that no formula
            calls, a layer without a variant.
    """
    path = values.path
    check_keys(table, STACK_KEYS, path, name)
    own = as_table(table.get("modules", {}), path, f"{name}.modules")
    for module in own:
        if module in shared:
            raise SpecError(path, f"{name}.modules.{module}", "is declared in [modules] already")
    written = table.get("layers", values.dims.get("layers"))
    if written is None:
        raise SpecError(path, f"{name}.layers", "is missing; set it, or dims.layers")
    key = f"{name}.layers" if "layers" in table else "dims.layers"
    count = read(Layers, written, values, key)
    values.used |= {"layers"} & values.dims.keys()
    variants = _variants(table, f"{name}.variants", values)
    chosen = _pattern(table.get("pattern"), count, list(variants), values, f"{name}.pattern")
    outer = _Wiring(name, "", own, shared, values, count)
    for content in variants.values():
        _check_names(content["modules"], f"{name}.modules", path)
    stem, stem_modules = outer.compile("stem", table.get("stem"))
    head, head_modules = outer.compile("head", table.get("head"))
    layers = {}
    for variant in dict.fromkeys(chosen):
        content = variants[variant]
        wiring = _Wiring(name, variant, content["modules"], shared, values, count)
        layers[variant] = LayerSpec(*wiring.compile("layer", content["layer"]))
    stack = StackSpec(
        name,
        stem,
        tuple(layers[variant] for variant in chosen),
        head,
        tuple({**dict(stem_modules), **dict(head_modules)}.items()),
    )
    called = {*stem.calls, *head.calls}
    for variant, content in variants.items():
        called |= set(formula.called(content["layer"], path, _layer_key(name, variant)))
    declared = [module for content in variants.values() for module in content["modules"]]
    check_called(declared, called, path, f"{name}.modules")
    return stack, called & shared.keys()


def _check_names(modules: Iterable[str], key: str, path: object) -> None:
    for name in modules:
        if name in RESERVED or name.startswith("_"):
            raise SpecError(path, f"{key}.{name}", "is a name that modules cannot have; rename it")


def check_called(declared: Iterable[str], called: Iterable[str], path: object, key: str) -> None:
    """Raises `SpecError` for a module that no formula calls: most likely a misspelt one."""
    called = set(called)
    for name in declared:
        if name not in called:
            raise SpecError(
                path, f"{key}.{name}", f"is called by no formula; {nearest(name, called)}"
            )


def _variants(table: Mapping[str, Any], key: str, values: Values) -> dict[str, Table]:
    """Layer formula and modules of every variant; the only one of a stack without is named ""."""
    base = {"layer": table.get("layer"), "modules": table.get("modules", {})}
    variants = as_table(table.get("variants", {}), values.path, key)
    for name, changes in variants.items():
        check_keys(changes, ("layer", "modules"), values.path, f"{key}.{name}")
        as_table(changes.get("modules", {}), values.path, f"{key}.{name}.modules")
    return {name: merge(base, changes) for name, changes in variants.items()} or {"": base}


def _layer_key(stack: str, variant: str) -> str:
    return f"{stack}.variants.{variant}.layer" if variant else f"{stack}.layer"


@dataclass(frozen=True)
class _Wiring:
    """What the formulas of a stack, or of a variant of its layers, may name."""

    stack: str
    variant: str
    own: Mapping[str, Any]
    shared: Mapping[str, Block]
    values: Values
    count: int

    def compile(self, part: str, text: Any) -> tuple[Formula, tuple[tuple[str, Block], ...]]:
        """A formula, and the modules of the stack that it calls."""
        path = self.values.path
        key = _layer_key(self.stack, self.variant) if part == "layer" else f"{self.stack}.{part}"
        calls = formula.called(text, path, key)
        modules = {
            name: read(Block, self.own[name], self.values, f"{self.stack}.modules.{name}")
            for name in dict.fromkeys(calls)
            if name in self.own
        }
        known = {**self.shared, **modules}
        compiled = compile_formula(
            text,
            path=path,
            key=key,
            inputs=_INPUTS[part],
            modules=[*self.shared, *self.own],
            takes=lambda name: "indices" if isinstance(known[name], LOOKUPS) else "vectors",
            constant=lambda name: self._constant(name, key),
        )
        for name in compiled.calls:
            if reason := _misplaced(known[name], part, calls.count(name)):
                raise SpecError(path, key, f"calls {name}, {reason}")
        return compiled, tuple(modules.items())

    def _constant(self, name: str, key: str) -> Any:
        if name == "layers":
            return self.count
        return self.values.dim(name, key) if name in self.values.dims else None


def _misplaced(block: Block, part: str, times: int) -> str:
    """Why a formula cannot call a block where and as often as it does; "" if it can."""
    if isinstance(block, Attention) and part != "layer":
        return "an attention, which only the formula of a layer can: each has a cache of its own"
    if isinstance(block, Attention) and times > 1:
        return f"an attention, {times} times, but it has one cache: declare a module for each call"
    if isinstance(block, Head) and part != "head":
        return "a vocabulary head, which only the head formula can"
    return ""


def check_tied(stack: StackSpec, shared: Mapping[str, Block], path: object) -> None:
    """Raises `SpecError` if a tied head finds no embedding of its shape to be tied to."""
    embed = shared.get("embed")
    for name, block in (*shared.items(), *stack.modules):
        if not isinstance(block, Head) or not block.tied:
            continue
        key = f"modules.{name}" if name in shared else f"{stack.name}.modules.{name}"
        if not isinstance(embed, Embedding):
            raise SpecError(path, f"{key}.tied", "needs an embedding called embed in [modules]")
        if (embed.size, embed.width) != (block.outputs, block.inputs):
            raise SpecError(
                path,
                f"{key}.tied",
                f"embed is {embed.size} x {embed.width}, this {block.outputs} x {block.inputs}",
            )


def _pattern(written: Any, count: int, variants: list[str], values: Values, key: str) -> list[str]:
    """The variant of each layer: a list that is repeated, or an expression of the layer's i."""
    if written is None:
        if len(variants) > 1:
            raise SpecError(values.path, key, "is missing: which layer is which variant?")
        return variants * count
    if variants == [""]:
        raise SpecError(values.path, key, "chooses among variants, but [variants] declares none")
    names = {name: name for name in variants}
    return [_variant_of(i, written, names, count, values, key) for i in range(count)]


def _variant_of(
    i: int, written: Any, names: Mapping[str, str], count: int, values: Values, key: str
) -> str:
    value = values.value(written, key, names={**names, "i": i, "layers": count})
    if isinstance(value, list) and value:
        value = value[i % len(value)]
    if not isinstance(value, str) or value not in names:
        raise SpecError(
            values.path, key, f"layer {i} would be {show(value)}; {nearest(value, names)}"
        )
    return value
