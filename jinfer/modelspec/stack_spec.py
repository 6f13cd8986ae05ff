"""Reading stacks: formulas, modules and the variant of each layer, to a `StackSpec`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinfer.modelspec import formula
from jinfer.modelspec.attention_blocks import AttentionSpec
from jinfer.modelspec.block import ArrayKind, Block
from jinfer.modelspec.blocks import AnyBlock, EmbeddingSpec, HeadSpec, VocabMapSpec
from jinfer.modelspec.bounded_types import LayerCount, Size
from jinfer.modelspec.eagle_head import read_follows
from jinfer.modelspec.formula import Formula, compile_formula
from jinfer.modelspec.layer_spec import LayerSpec, StackSpec, indexer_of
from jinfer.modelspec.spec_errors import SpecError, nearest_hint, show_value
from jinfer.modelspec.spec_values import SpecValues
from jinfer.modelspec.table_reader import read_value
from jinfer.modelspec.toml_tables import (
    Table,
    as_table,
    check_keys,
    check_text,
    merge,
    strings_in,
)

_NUMBERED = re.compile(r"\bi\b")  # what depends on a layer's number

STACK_KEYS = (
    *("layers", "stem", "layer", "head", "classes"),
    *("modules", "variants", "pattern", "follows"),
)
VISION_KEYS = (*STACK_KEYS, "dims", "group")
# Levels of the module tree that the names of parameters omit.
RESERVED = ("shared", "stacks", "layers", "modules", "value")
_INPUTS: dict[str, dict[str, ArrayKind]] = {
    "stem": {"tokens": "indices", "positions": "indices", "token_types": "indices"},
    "layer": {"x": "vectors", "tokens": "indices", "positions": "indices"},
    "head": {"x": "vectors"},
    "follows.hidden": {"hidden": "vectors"},
}
_GRID: dict[str, ArrayKind] = {"grid": "grid"}
_VISION_INPUTS: dict[str, dict[str, ArrayKind]] = {
    "stem": {"patches": "vectors", "rows": "indices", "columns": "indices", **_GRID},
    "layer": {"x": "vectors", **_GRID},
    "head": {"x": "vectors", **_GRID},
}


def read_shared(
    table: Mapping[str, Any], values: SpecValues
) -> tuple[dict[str, Block], frozenset[str]]:
    """Reads `[modules]`, which every stack may call; and the names of those left out by `when`.

    Raises:
        SpecError: an invalid module.
    """
    _check_names(table, "modules", values.path)
    present, absent = _present(table, "modules", values)
    shared = {
        name: read_value(AnyBlock, present[name], values, f"modules.{name}") for name in present
    }
    for name, block in shared.items():
        if block.cached() is not None:
            raise SpecError(values.path, f"modules.{name}", "belongs to the layers of a stack")
    return shared, absent


def _present(
    table: Mapping[str, Any], key: str, values: SpecValues
) -> tuple[dict[str, Any], frozenset[str]]:
    """The modules that the model has, without their `when`; and the names of absent ones."""
    present, absent = {}, set()
    for name, module in table.items():
        if not isinstance(module, Mapping) or "when" not in module:
            present[name] = module
        elif read_value(bool, module["when"], values, f"{key}.{name}.when"):
            present[name] = {field: value for field, value in module.items() if field != "when"}
        else:
            absent.add(name)
    return present, frozenset(absent)


def read_stack(
    name: str,
    table: Any,
    shared: Mapping[str, Block],
    values: SpecValues,
    absent: frozenset[str] = frozenset(),
    encoded: bool = False,
) -> tuple[StackSpec, set[str]]:
    """Reads a stack; returns it and the shared modules that its formulas call.

    Args:
        absent: shared modules left out by `when`.
        encoded: whether the layers take an encoder's output.

    Raises:
        SpecError: an unknown key, an invalid formula or module, a module that no formula calls, a
            layer without a variant.
    """
    path = values.path
    check_keys(table, VISION_KEYS if name == "vision" else STACK_KEYS, path, name)
    where = f"{name}.modules"
    own = as_table(table.get("modules", {}), path, where)
    written = table.get("layers", values.dims.get("layers"))
    if written is None:
        raise SpecError(path, f"{name}.layers", "is missing; set it, or dims.layers")
    key = f"{name}.layers" if "layers" in table else "dims.layers"
    count = read_value(LayerCount, written, values, key)
    values.used |= {"layers"} & values.dims.keys()
    variants = _variants(table, f"{name}.variants", values)
    chosen = _pattern(table.get("pattern"), count, list(variants), values, f"{name}.pattern")
    outer = _FormulaScope(name, "", own, shared, values, count, absent, {})
    inner: dict[str, ArrayKind] = {"encoded": "encoded"} if encoded else {}
    assigned = set[str]()
    for content in variants.values():
        _check_names(content["modules"], where, path)
        for module in content["modules"]:
            if module in shared:
                raise SpecError(path, f"{where}.{module}", "is declared in [modules] already")
    follows, follow_modules = None, tuple[tuple[str, Block], ...]()
    if "follows" in table:
        given, where_follows = table["follows"], f"{name}.follows"
        text = as_table(given, path, where_follows).get("hidden")
        hidden, follow_modules = outer.compile("follows.hidden", text)
        follows = read_follows(given, hidden, values, where_follows)
        outer = replace(outer, inputs={"hidden": "vectors"})
    stem, stem_modules = outer.compile("stem", table.get("stem"))
    assigned |= stem.assigned
    layers, made = [], dict[tuple[str, Any], LayerSpec]()
    for i, variant in enumerate(chosen):
        content = variants[variant]
        at = replace(values, names={"i": i, "layers": count})
        here = (variant, _own_values(content, at))
        if here not in made:
            wiring = _FormulaScope(
                name,
                variant,
                content["modules"],
                shared,
                at,
                count,
                absent,
                inner,
                _before(assigned),
            )
            layer = LayerSpec(*wiring.compile("layer", content["layer"]))
            made[here] = next((other for other in made.values() if other == layer), layer)
        layers.append(made[here])
        assigned |= made[here].wiring.assigned
        _check_kv_layers(i, layers, path, where)
        _check_chosen_keys(i, layers, path, where)
    ending = replace(outer, inputs={}, before=_before(assigned))
    head_text = _with_classes(table, path, name)
    head, head_modules = ending.compile("head", head_text)
    stack = StackSpec(
        name,
        stem,
        tuple(layers),
        head,
        tuple({**dict(follow_modules), **dict(stem_modules), **dict(head_modules)}.items()),
        follows,
        group=read_value(Size, table.get("group", 1), values, f"{name}.group"),
    )
    called = set[str]()
    for part, text in (("stem", table["stem"]), ("head", head_text)):
        called |= set(formula.modules_called(text, path, f"{name}.{part}"))
    if follows is not None:
        called |= set(follows.hidden.calls)
    for variant, content in variants.items():
        called |= set(formula.modules_called(content["layer"], path, _layer_key(name, variant)))
    uncalled = {
        module: written
        for content in variants.values()
        for module, written in content["modules"].items()
        if module not in called
    }
    check_called(_present(uncalled, where, values)[0], called, path, where)
    return stack, called & shared.keys()


def _with_classes(table: Mapping[str, Any], path: object, name: str) -> Any:
    """The text of a stack's head, with the line that `classes` adds to it.

    A key of its own, so that a table laid over any family can add one.
    """
    head = table.get("head")
    if "classes" not in table or not isinstance(head, str):
        return head
    classes = check_text(table["classes"], path, f"{name}.classes").strip()
    if "\n" in classes:
        raise SpecError(path, f"{name}.classes", "has several lines; write one expression")
    return f"{head.strip()}\nclasses = {classes}"


def _check_kv_layers(i: int, layers: Sequence[LayerSpec], path: object, key: str) -> None:
    """Raises `SpecError` where the last layer's attentions share keys that there are none of."""
    for name, block in layers[i].modules:
        if not isinstance(block, AttentionSpec) or (number := block.kv_layer) is None:
            continue
        where = f"{key}.{name}.kv_layer"
        owner = dict(layers[number].modules).get(name) if number < i else None
        if owner is None or owner.cached() is None:
            reason = f"layer {i} takes the keys of layer {number}, which has none under that name"
            raise SpecError(path, where, f"{reason}; name an earlier layer that has its own")
        if not block.shares_with(owner):
            reason = f"layer {i} has not the kv_heads, head_dim, value_dim, window and position of"
            raise SpecError(path, where, f"{reason} layer {number}, whose keys it takes")


def _check_chosen_keys(i: int, layers: Sequence[LayerSpec], path: object, key: str) -> None:
    """Raises `SpecError` where attentions of the last layer use chosen keys that there are not."""
    for name in layers[i].reusing:
        where = f"{key}.{name}.indexer"
        choosing = [layer for layer in layers[:i] if name in layer.choosing]
        if not choosing:
            reason = f"is true, and no layer before {i} has an indexer of its own there"
            raise SpecError(path, f"{where}.shared", f"{reason}; write false")
        own, used = (indexer_of(dict(one.modules)[name]) for one in (choosing[-1], layers[i]))
        if own is not None and used is not None and own.top_k != used.top_k:
            reason = f"is {used.top_k} in layer {i}, which uses the {own.top_k} of a layer before"
            raise SpecError(path, f"{where}.top_k", f"{reason}; say as many")


def _before(assigned: Iterable[str]) -> tuple[str, ...]:
    """The names, other than `x`, that a formula can take from earlier formulas."""
    return tuple(sorted(set(assigned) - {"x"}))


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
                path, f"{key}.{name}", f"is called by no formula; {nearest_hint(name, called)}"
            )


def _variants(table: Mapping[str, Any], key: str, values: SpecValues) -> dict[str, Table]:
    """Layer formula and modules of every variant; a single unnamed variant is ""."""
    base = {"layer": table.get("layer"), "modules": table.get("modules", {})}
    variants = as_table(table.get("variants", {}), values.path, key)
    for name, changes in variants.items():
        check_keys(changes, ("layer", "modules"), values.path, f"{key}.{name}")
        as_table(changes.get("modules", {}), values.path, f"{key}.{name}.modules")
    return {name: merge(base, changes) for name, changes in variants.items()} or {"": base}


def _own_values(content: Mapping[str, Any], values: SpecValues) -> Any:
    """What distinguishes a layer from others of its variant: the values that depend on its number.

    Most layers are equal, and reading each of them would be slow.
    """
    if _NUMBERED.search(str(content["layer"])):
        return values.names["i"]
    texts = [text for text in strings_in(content["modules"]) if _NUMBERED.search(text)]
    try:
        return repr([values.value(text, "", names=values.names) for text in texts])
    except SpecError:  # a plain word, or invalid: checked when it is read
        return values.names["i"]


def _layer_key(stack: str, variant: str) -> str:
    return f"{stack}.variants.{variant}.layer" if variant else f"{stack}.layer"


@dataclass(frozen=True)
class _FormulaScope:
    """The names that the formulas of a stack, or of a layer variant, may use."""

    stack: str
    variant: str
    own: Mapping[str, Any]
    shared: Mapping[str, Block]
    values: SpecValues
    count: int
    absent: frozenset[str]
    inputs: Mapping[str, ArrayKind]
    before: tuple[str, ...] = ()

    def compile(self, part: str, text: Any) -> tuple[Formula, tuple[tuple[str, Block], ...]]:
        """Compiles a formula; returns it with the stack's modules that it calls."""
        path = self.values.path
        key = _layer_key(self.stack, self.variant) if part == "layer" else f"{self.stack}.{part}"
        where = f"{self.stack}.modules"
        names = dict.fromkeys(formula.modules_called(text, path, key))
        own, absent = _present({n: self.own[n] for n in names if n in self.own}, where, self.values)
        absent |= self.absent
        modules = {
            name: read_value(AnyBlock, own[name], self.values, f"{where}.{name}")
            for name in names
            if name in own
        }
        known = {**self.shared, **modules}
        compiled = compile_formula(
            text,
            path=path,
            key=key,
            inputs={**(_VISION_INPUTS if self.stack == "vision" else _INPUTS)[part], **self.inputs},
            before=self.before,
            modules=[*self.shared, *self.own],
            argument_kinds=lambda name: known[name].arguments(),
            constant=lambda name: self._constant(name, key),
            sizes={"layers", *self.values.names, *self.values.dims},
            absent=absent,
            ends=None if part == "head" else ("", "x"),
        )
        modules = {name: block for name, block in modules.items() if name in compiled.calls}
        left = formula.modules_called(compiled.text, path, key)
        for name in compiled.calls:
            if reason := _misplaced(known[name], self.stack, part, left.count(name)):
                raise SpecError(path, key, f"calls {name}, {reason}")
        if part == "layer":
            passes = {name: known[name].passes for name in compiled.calls}
            compiled = replace(compiled, passing=tuple((n, k) for n, k in passes.items() if k))
        return compiled, tuple(modules.items())

    def _constant(self, name: str, key: str) -> Any:
        if name == "layers":
            return self.count
        if name in self.values.names:
            return self.values.names[name]
        return self.values.dim(name, key) if name in self.values.dims else None


def _misplaced(block: Block, stack: str, part: str, times: int) -> str:
    """Why a formula cannot call a block there or that often; "" if it can."""
    if block.cached() is not None and part != "layer":
        return "an attention, which only the formula of a layer can: each has a cache of its own"
    if block.cached() is not None and times > 1:
        return f"an attention, {times} times, but it has one cache: declare a module for each call"
    return block.misplaced(stack, part)


def used_shared(shared: Mapping[str, Block], stacks: Iterable[StackSpec]) -> dict[str, Block]:
    """The shared modules that the model has: those that the remaining lines of formulas call."""
    names = {
        name
        for stack in stacks
        for part in (stack.stem, stack.head, *(layer.wiring for layer in stack.layers))
        for name in part.calls
    }
    blocks = [shared.get(name) for name in names]
    blocks += [block for stack in stacks for _, block in stack.modules]
    if any(isinstance(block, HeadSpec) and block.tied for block in blocks):
        names.add("embed")
    return {name: block for name, block in shared.items() if name in names}


def check_tied(stack: StackSpec, shared: Mapping[str, Block], path: object) -> None:
    """Raises `SpecError` if a tied head has no embedding of its shape."""
    embed = shared.get("embed")
    for name, block in (*shared.items(), *stack.modules):
        if not isinstance(block, HeadSpec) or not block.tied:
            continue
        key = f"modules.{name}" if name in shared else f"{stack.name}.modules.{name}"
        if not isinstance(embed, EmbeddingSpec):
            raise SpecError(path, f"{key}.tied", "needs an embedding called embed in [modules]")
        if (embed.size, embed.width) != (block.outputs, block.inputs):
            raise SpecError(
                path,
                f"{key}.tied",
                f"embed is {embed.size} x {embed.width}, this {block.outputs} x {block.inputs}",
            )


def check_vocabulary(
    stack: StackSpec, shared: Mapping[str, Block], vocab: int, path: object
) -> None:
    """Raise `SpecError` if a decoder's head gives more or fewer logits than there are tokens."""
    called = {n: b for n, b in (*shared.items(), *stack.modules) if n in stack.head.calls}
    if any(isinstance(block, VocabMapSpec) for block in called.values()):
        return
    for name, block in called.items():
        if isinstance(block, HeadSpec) and block.outputs != vocab:
            key = f"modules.{name}" if name in shared else f"{stack.name}.modules.{name}"
            reason = f"{block.outputs} logits are not those of dims.vocab = {vocab} tokens"
            raise SpecError(path, f"{key}.outputs", f"{reason}; leave it out, or add a vocab_map")


def _pattern(
    written: Any, count: int, variants: list[str], values: SpecValues, key: str
) -> list[str]:
    """The variant of each layer: a repeated list, or an expression of the layer's i."""
    if written is None:
        if len(variants) > 1:
            raise SpecError(values.path, key, "is missing: which layer is which variant?")
        return variants * count
    if variants == [""]:
        raise SpecError(values.path, key, "chooses among variants, but [variants] declares none")
    names = {name: name for name in variants}
    return [_variant_of(i, written, names, count, values, key) for i in range(count)]


def _variant_of(
    i: int, written: Any, names: Mapping[str, str], count: int, values: SpecValues, key: str
) -> str:
    value = values.value(written, key, names={**names, "i": i, "layers": count})
    if isinstance(value, list) and value:
        value = value[i % len(value)]
    if not isinstance(value, str) or value not in names:
        raise SpecError(
            values.path,
            key,
            f"layer {i} would be {show_value(value)}; {nearest_hint(value, names)}",
        )
    return value
