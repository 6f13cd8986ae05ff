"""Spec keys: docs/reference/spec_keys.md, made from the dataclasses of `modelspec`."""

import dataclasses
import inspect
import re
import textwrap
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from jinfer.modelspec.attention_blocks import (
    AttentionSpec,
    DifferentialSpec,
    IndexerSpec,
    OutputGateSpec,
    QKNormSpec,
    TemperatureSpec,
)
from jinfer.modelspec.blocks import BLOCKS
from jinfer.modelspec.bounded_types import describe, fields, union
from jinfer.modelspec.feed_forward_blocks import ACTIVATION_ALIASES
from jinfer.modelspec.image_table import SIZE_RULES, ImageLayoutSpec, ImageSpec
from jinfer.modelspec.model_spec import ClassificationSpec, EngineSpec, PromptSpec
from jinfer.modelspec.partition_table import MeshSpec, PartitionSpec
from jinfer.modelspec.position_blocks import RopeScalingSpec
from jinfer.modelspec.quantization_table import QuantizationSpec, RuleSpec
from jinfer.modelspec.speculation_table import DraftSpec, SpeculationSpec

_WIDTH = 120  # of lines
_PLAIN = {str: "a text", bool: "true or false", float: "a number", int: "a whole number"}


# Heading, introduction, and the dataclass of each table that is no module.
_TABLES: tuple[tuple[str, str, Any], ...] = (
    ("qk_norm, out_norm", "Norms of queries and keys, and of the heads' outputs.", QKNormSpec),
    ("gate of an attention", "Multiplies the heads' outputs before `o`.", OutputGateSpec),
    ("differential", "Differential attention (arXiv 2410.05258).", DifferentialSpec),
    ("temperature of an attention", "Scales queries by their position.", TemperatureSpec),
    ("indexer", "Chooses the keys of sparse attention (arXiv 2512.02556).", IndexerSpec),
    ("scaling of rope", "Takes the `rope_scaling` of a config.json whole.", RopeScalingSpec),
    ("[prompt]", "Turns a conversation into a prompt.", PromptSpec),
    ("[engine]", "Sizes and settings of the engine.", EngineSpec),
    ("[quantization]", "How weights and the KV cache are stored.", QuantizationSpec),
    ("rules of [quantization]", "Each rule is a table in a list.", RuleSpec),
    ("[partition]", "Which device holds which part of the model.", PartitionSpec),
    ("mesh of [partition]", "Takes the devices in their order.", MeshSpec),
    ("[speculation]", "Draft sources and the number of drafted tokens.", SpeculationSpec),
    ("draft of [speculation]", "An entry is a text, its `source`, or this table.", DraftSpec),
    ("[image]", "How images become patches and placeholder tokens.", ImageSpec),
    ("[image.layout]", "Texts around an image's placeholders, not expressions.", ImageLayoutSpec),
    ("[classification]", "How scores of classes are read.", ClassificationSpec),
)


def page() -> str:
    """The whole page."""
    aliases = ", ".join(f"`{name}` (`{own}`)" for name, own in sorted(ACTIVATION_ALIASES.items()))
    parts = [
        "# Specification keys",
        "The keys of every module and table of a specification; [specs.md](../specs.md) teaches "
        "the language. Keys with a default may be omitted; a default `dims.x` is the size of that "
        "name.",
        f"Activations also have the names that config files use: {aliases}.",
        "## Modules",
        *(_section(cls) for cls in BLOCKS),
        "## Positions of an attention",
        *(_section(cls) for cls in _positions()),
        "## Sizes of images",
        *(_section(cls) for cls in SIZE_RULES),
        "## Tables",
        *(f"### {title}\n\n{about}\n\n{_table(cls)}" for title, about, cls in _TABLES),
    ]
    return "\n\n".join(textwrap.fill(p, _WIDTH) if p[0].isalpha() else p for p in parts) + "\n"


def _positions() -> list[Any]:
    return [
        cls for cls in union(fields(AttentionSpec)["position"][1]) if dataclasses.is_dataclass(cls)
    ]


def _section(cls: Any) -> str:
    kind = get_args(fields(cls)["kind"][1])[0]
    about = "\n".join(_about(cls))
    return f"### `{kind}`\n\n{about}\n\n{_table(cls)}"


def _about(cls: Any) -> list[str]:
    """The lines of a docstring that describe no single field."""
    text, lines = inspect.cleandoc(cls.__doc__), []
    inside = False
    for line in text.splitlines():
        inside = line != "" and (inside or _meaning_of(line, cls) is not None)
        if not inside and line != "Attributes:":
            lines.append(line)
    return "\n".join(lines).strip().splitlines()


def _meanings(cls: Any) -> dict[str, str]:
    """Descriptions of fields: lines `field: ...` of a docstring, with the lines that follow."""
    base = cls.__base__
    meanings: dict[str, str] = _meanings(base) if dataclasses.is_dataclass(base) else {}
    name = ""
    for line in inspect.cleandoc(cls.__doc__).splitlines():
        if found := _meaning_of(line, cls):
            name = found[1]
            meanings[name] = found[2]
        elif not line.strip():
            name = ""
        elif name:
            meanings[name] += " " + line.strip()
    return meanings


def _meaning_of(line: str, cls: Any) -> re.Match[str] | None:
    found = re.match(r"\s*(\w+): (.*)", line)
    return found if found and found[1] in fields(cls) else None


def _table(cls: Any) -> str:
    meanings = _meanings(cls)
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for name, (field, hint) in fields(cls).items():
        if name != "kind":
            cells = (f"`{name}`", _type(hint), _default(field), meanings.get(name, ""))
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) if len(rows) > 2 else "It has no keys."


def _type(hint: Any) -> str:
    options = [_option(option) for option in union(hint)]
    return " or ".join(option for option in dict.fromkeys(options))


def _option(option: Any) -> str:
    if get_origin(option) is Annotated:
        return describe(option)
    if get_origin(option) is Literal:
        return ", ".join(f"`{word}`" for word in get_args(option))
    if get_origin(option) is tuple:
        of_tables = dataclasses.is_dataclass(get_args(option)[0])
        of_texts = get_args(option)[0] is str
        return f"a list of {'tables' if of_tables else 'texts' if of_texts else 'numbers'}"
    if dataclasses.is_dataclass(option):
        kind = get_type_hints(option).get("kind")
        kinds = " or ".join(f"`{word}`" for word in get_args(kind))
        return f"{kinds} table" if kind else "a table, see below"
    return "`none`" if option is type(None) else _PLAIN[option]


def _default(field: dataclasses.Field[Any]) -> str:
    if "served" in field.metadata:
        return "`engine.context`"
    if "dim" in field.metadata:
        return f"`dims.{field.metadata['dim']}`"
    if field.default is dataclasses.MISSING:
        return "must be given"
    if dataclasses.is_dataclass(field.default):
        return "its defaults"
    words = {None: "none", True: "true", False: "false", "": '""'}
    is_word = field.default in (None, "") or isinstance(field.default, bool)
    return f"`{words[field.default] if is_word else field.default}`"
