"""The tables of docs/specs.md that are made from the dataclasses.

`python -m tests.modelspec.reference` writes them anew; test_docs.py compares them.
"""

import dataclasses
import inspect
import re
import textwrap
from pathlib import Path
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
from jinfer.modelspec.model_spec import ClassificationSpec, EngineSpec, PromptSpec
from jinfer.modelspec.partition_table import MeshSpec, PartitionSpec
from jinfer.modelspec.position_blocks import RopeScalingSpec
from jinfer.modelspec.quantization_table import QuantizationSpec, RuleSpec
from jinfer.modelspec.speculation_table import DraftSpec, SpeculationSpec

WIDTH = 120  # of lines
PAGE = Path(__file__).parents[2] / "docs" / "specs.md"
_PLAIN = {str: "a text", bool: "true or false", float: "a number", int: "a whole number"}


def reference() -> dict[str, str]:
    """Every generated part of the page, by the name in its markers."""
    return {
        "blocks": "\n\n".join(_section(cls) for cls in BLOCKS),
        "positions": "\n\n".join(_section(cls) for cls in _positions()),
        "qk_norm": _table(QKNormSpec),
        "gate": _table(OutputGateSpec),
        "differential": _table(DifferentialSpec),
        "temperature": _table(TemperatureSpec),
        "indexer": _table(IndexerSpec),
        "scaling": _table(RopeScalingSpec),
        "engine": _table(EngineSpec),
        "prompt": _table(PromptSpec),
        "quantization": _table(QuantizationSpec),
        "rules": _table(RuleSpec),
        "partition": _table(PartitionSpec),
        "mesh": _table(MeshSpec),
        "speculation": _table(SpeculationSpec),
        "draft": _table(DraftSpec),
        "classification": _table(ClassificationSpec),
        "activations": textwrap.fill(
            ", ".join(
                f"`{alias}` (`{name}`)" for alias, name in sorted(ACTIVATION_ALIASES.items())
            ),
            WIDTH,
        ),
    }


def _positions() -> list[Any]:
    """The tables that can be the position of an attention."""
    return [
        cls for cls in union(fields(AttentionSpec)["position"][1]) if dataclasses.is_dataclass(cls)
    ]


def rewritten(page: str) -> str:
    """The page with its generated parts made anew."""
    for name, text in reference().items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        assert found, f"the page has no place for {name}"
        page = f"{before}{begin}{text}\n{end}{after}"
    return page


def _section(cls: Any) -> str:
    """A heading with the kind, what it is, and its keys."""
    kind = get_args(fields(cls)["kind"][1])[0]
    about = "\n".join(_about(cls))
    return f"### `{kind}`\n\n{about}\n\n{_table(cls)}"


def _about(cls: Any) -> list[str]:
    """The lines of a docstring that are about no single field."""
    text, lines = inspect.cleandoc(cls.__doc__), []
    inside = False
    for line in text.splitlines():
        inside = line != "" and (inside or _meaning_of(line, cls) is not None)
        if not inside:
            lines.append(line)
    return "\n".join(lines).strip().splitlines()


def _meanings(cls: Any) -> dict[str, str]:
    """What a docstring says of each field, on a line `field: ...` and the lines that follow."""
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
    rows = ["| key | value | default | |", "|---|---|---|---|"]
    for name, (field, hint) in fields(cls).items():
        if name != "kind":
            cells = (f"`{name}`", _type(hint), _default(field), meanings.get(name, ""))
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) if len(rows) > 2 else "No keys."


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
    words = {None: "none", True: "true", False: "false"}
    is_word = field.default is None or isinstance(field.default, bool)
    return f"`{words[field.default] if is_word else field.default}`"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
