"""Architectures of other programs, and the family that loads each: docs/reference/architectures.md.

`architectures.toml` has the names that transformers, mlx-lm and vLLM register, and what is missing
for those that no family loads; llama.cpp's names are those of the installed package `gguf`.
`python -m tools.architectures_reference FOLDER` reads the names from the packages `transformers`,
`mlx_lm` and `vllm`, unpacked in FOLDER, and prints them as TOML.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import MODEL_ARCH_NAMES

from jinfer.modelspec.spec_files import (
    CLASSIFIES,
    architecture_of,
    families,
    format_table,
    read_toml,
)

LISTS = Path(__file__).with_name("architectures.toml")
_TESTS = Path(__file__).parents[1] / "tests"
# Of each task, transformers' table of its classes, and the page's heading.
TASKS = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "decoders"),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "masked language models"),
    "translating": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "encoder-decoders"),
    "encoding": ("MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES", "text encoders"),
    "classifying": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "classification"),
}
_INTRODUCTION = """# Architectures

What other programs load, and the [family](../models.md) that loads it here: transformers
{transformers}, llama.cpp's `gguf` {gguf}, mlx-lm {mlx_lm} and vLLM {vllm}. Classes of images and
sounds alone are left out. "Checked by" names stored values of transformers or of another
implementation (`tests/goldens`, `tests/families/*.npz`), "NumPy" a definition in a test, and a
"header" the names and shapes of a converted file. A class for classification is loaded as its
family is, with its head's tensors.

{table}
"""

type Row = tuple[str, str, str]


@cache
def lists() -> dict[str, Any]:
    """The tables of `architectures.toml`."""
    return tomllib.loads(LISTS.read_text(encoding="utf-8"))


def page() -> str:
    """The page's text."""
    sections = {f"transformers: {TASKS[task][1]}": _class_rows(task) for task in TASKS}
    sections["llama.cpp"] = [_gguf_row(name) for name in sorted(MODEL_ARCH_NAMES.values())]
    sections["mlx-lm"] = [_mlx_row(name) for name in lists()["mlx_lm"]["types"]]
    sections["vLLM"] = _rows(lists()["vllm"]["classes"])
    summary = [
        (
            head,
            str(len(rows)),
            str(sum(r[1][0] == "`" for r in rows)),
            str(sum(map(_checked, rows))),
        )
        for head, rows in sections.items()
    ]
    versions = {
        name: lists()[name]["version"] for name in ("transformers", "gguf", "mlx_lm", "vllm")
    }
    table = _table(("list", "names", "loaded", "checked"), summary)
    parts = [_INTRODUCTION.format(table=table, **versions)]
    for head, rows in sections.items():
        parts.append(f"## {head}\n\n{_table(('name', 'family', 'checked by'), rows)}\n")
    return "\n".join(parts)


def _checked(row: Row) -> bool:
    return row[2] not in ("", "header")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def text_classes(task: str) -> list[str]:
    """Transformers' classes of a task that texts go through."""
    others = lists()["transformers"]["no_text"]
    return [name for name in lists()["transformers"][task] if name not in others]


def _class_rows(task: str) -> list[Row]:
    return _rows(text_classes(task))


def _rows(architectures: Iterable[str]) -> list[Row]:
    return [(f"`{name}`", _family_of(name), _check_of(name)) for name in architectures]


@cache
def architecture_families() -> dict[str, list[str]]:
    """Architectures -> the families that name them in `[match]`."""
    found = defaultdict(list)
    for family, path in families().items():
        for name in read_toml(path).get("match", {}).get("architectures", []):
            found[name].append(family)
    return found


@cache
def gguf_families() -> dict[str, list[str]]:
    """llama.cpp's names -> the families that name them in `[match]`."""
    found = defaultdict(list)
    for family, path in families().items():
        for name in read_toml(path).get("match", {}).get("gguf", []):
            found[name].append(family)
    return found


def _aliases(architecture: str) -> Iterator[str]:
    yield architecture
    if architecture.endswith(CLASSIFIES):
        stem = architecture.removesuffix(CLASSIFIES)
        yield from (f"{stem}Model", f"{stem}ForCausalLM")


def _family_of(architecture: str) -> str:
    if (missing := lists()["missing"].get(architecture)) is not None:
        return str(missing)
    names = [
        family
        for alias in _aliases(architecture)
        for family in architecture_families().get(alias, [])
    ]
    if names:
        return ", ".join(f"`{name}`" for name in sorted(set(names)))
    if architecture in format_table("multimodal")["architectures"]:
        return "`multimodal`, its text"
    return "none"


def _check_of(architecture: str) -> str:
    return _goldens().get(architecture) or ("NumPy" if f'"{architecture}"' in _tests() else "")


@cache
def _goldens() -> dict[str, str]:
    """Architectures -> one of the checkpoints with stored values of a reference."""
    found: dict[str, str] = {}

    def add(config: dict[str, Any], name: str) -> None:
        for architecture in config.get("architectures") or ():
            found.setdefault(architecture, f"`{name}`")

    for path in sorted((_TESTS / "goldens").glob("*/config.json")):
        add(json.loads(path.read_text()), path.parent.name)
    for file in ("architectures", "transformers_logits", "second_checkpoints", "multimodal_logits"):
        with np.load(_TESTS / "families" / f"{file}.npz") as stored:
            for key in filter(lambda key: key.endswith(".made"), stored):
                made = stored[key]
                text = bytes(made) if made.dtype == np.uint8 else str(made)
                add(json.loads(text)["config"], key.removesuffix(".made"))
    return found


@cache
def _tests() -> str:
    return "".join(path.read_text() for path in sorted((_TESTS / "families").glob("*.py")))


@cache
def _gguf_goldens() -> dict[str, str]:
    families_of = json.loads((_TESTS / "families" / "goldens.json").read_text())
    return {
        family: f"`{name}`"
        for family, names in families_of.items()
        for name in names
        if name.startswith("gguf_")
    }


def _gguf_row(name: str) -> Row:
    names = gguf_families().get(name, [])
    checks = [check for family in names if (check := _gguf_goldens().get(family))]
    headers = (_TESTS / "families" / "gguf_headers.json").read_text()
    numpy = "NumPy" if f'"{name}"' in _tests() else "header" if f'"{name}"' in headers else ""
    family = ", ".join(f"`{each}`" for each in names)
    missing = lists()["missing"].get(name, "none")
    return f"`{name}`", family or str(missing), checks[0] if checks else numpy if names else ""


def _mlx_row(name: str) -> Row:
    architecture = lists()["mlx_lm"]["classes"].get(name) or architecture_of(name)
    if architecture is None:
        types = lists()["transformers"]["types"]
        architecture = types.get(name) or types.get(name.replace("_text", ""))
    if architecture is None:
        return f"`{name}`", str(lists()["missing"].get(name, "none")), ""
    return f"`{name}`", _family_of(architecture), _check_of(architecture)


def read_lists(folder: Path) -> str:
    """The lists of the packages in a folder, as the tables of `architectures.toml`."""
    auto = (folder / "transformers/models/auto/modeling_auto.py").read_text(encoding="utf-8")
    tables = {
        node.targets[0].id: node.value
        for node in ast.parse(auto).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    lines = []
    types: dict[str, str] = {}
    for task, (table, _) in TASKS.items():
        pairs: list[tuple[str, Any]] = _pairs(tables[table])
        names = sorted(
            {n for _, value in pairs for n in ([value] if isinstance(value, str) else value)}
        )
        lines.append(f"{task} = {json.dumps(names)}")
        if task == "causal":
            types = {kind: value for kind, value in pairs if isinstance(value, str)}
    lines.append("[transformers.types]")
    lines += [f'"{kind}" = "{value}"' for kind, value in sorted(types.items())]
    files = (folder / "mlx_lm/models").glob("*.py")
    models = sorted(path.stem for path in files if "class Model(" in path.read_text("utf-8"))
    lines.append(f"[mlx_lm]\ntypes = {json.dumps(models)}")
    registry = (folder / "vllm/model_executor/models/registry.py").read_text(encoding="utf-8")
    text = registry.partition("_TEXT_GENERATION_MODELS = {")[2].partition("\n}")[0]
    classes = sorted(set(re.findall(r'^    "(\w+)":', text, re.MULTILINE)))
    lines.append(f"[vllm]\nclasses = {json.dumps(classes)}")
    return "\n".join(lines)


def _pairs(table: ast.expr) -> list[tuple[str, Any]]:
    """The literal entries of an `OrderedDict([...])`."""
    assert isinstance(table, ast.Call)
    assert isinstance(table.args[0], ast.List)
    return [ast.literal_eval(pair) for pair in table.args[0].elts if isinstance(pair, ast.Tuple)]


if __name__ == "__main__":
    print(read_lists(Path(sys.argv[1])))
