"""Random changes of the specifications that come with jinfer: a model or a `SpecError`, soon."""

import copy
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.resolve_spec import CheckpointFacts, resolve
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_files import (
    families,
    format_table,
    parse_override,
    read_toml,
    with_families,
)
from jinfer.modelspec.toml_tables import merge

from .cases import GGUF, LLAMA, LLAMA2C, Case, cases, gguf_cases
from .helpers import PATH, facts

SLOWEST = 2.0  # seconds of this thread's work; the usual is a millisecond

WORDS = st.sampled_from(
    [
        *LLAMA,
        *GGUF,
        "x",
        "tokens",
        "heads",
        "layers",
        "hidden",
        "attn",
        "ffn",
        "norm",
        "embed",
        "logits",
        "when",
        "encoded",
        "cross",
        "token_types",
    ]
)
PIECES = st.sampled_from(
    ["$", "|", "(", ")", "[", "]", "{", "}", "{i}", "{a,b}", "+", "-", "*", "/", "//", "**", "%",
     " if ", " else ", " and ", " in ", "not ", "==", "<", "=", "\n", ",", ".", "'", '"', "\\", "#",
     ":", ";", "lambda", "for", "sqrt", "len", "max", "has", "none", "true", "0", "64", "1e400",
     "9" * 40, "_key0", "\0", "é", "\ud800", "%s"]
)  # fmt: skip
FORMULAS = st.lists(WORDS | PIECES, max_size=12).map("".join) | st.text(max_size=20)
NUMBERS = st.integers() | st.floats() | st.booleans() | st.none()
SCALARS = NUMBERS | FORMULAS | st.sampled_from([2**31, 10**400, 0, 1, -1])
KEYS = WORDS | st.text(max_size=6) | st.sampled_from(
    ["kind", "dims", "modules", "decoder", "variants", "pattern", "layer", "position", "scaling",
     "from", "groups", "tensors", "gguf", "window", "tied", "prefix", "ignore", "match", "engine",
     "encoder", "when", "qk_norm", "axis"]
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


def slots(table: Any) -> Iterator[tuple[MutableMapping[str, Any], str]]:
    """Every place of a nested table where a value stands."""
    for key, value in table.items():
        yield table, key
        if isinstance(value, dict):
            yield from slots(value)


def mutate(table: dict[str, Any], data: st.DataObject) -> None:
    """Deletes, replaces, renames or adds something in a table."""
    places = list(slots(table))
    if not places:
        return
    owner, key = places[data.draw(st.integers(0, len(places) - 1))]
    match data.draw(st.sampled_from(["delete", "replace", "rename", "add", "text"])):
        case "delete":
            del owner[key]
        case "replace":
            owner[key] = data.draw(VALUES)
        case "rename":
            owner[data.draw(KEYS)] = owner.pop(key)
        case "add":
            owner[data.draw(KEYS)] = data.draw(VALUES)
        case "text":
            owner[key] = edited(str(owner[key]), data)


def edited(text: str, data: st.DataObject) -> str:
    """A text with a piece of it replaced."""
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, min(len(text), begin + 8)))
    return text[:begin] + data.draw(WORDS | PIECES) + text[end:]


def caught(action: Callable[[], Any]) -> tuple[Any, str]:
    """An action's result and no error, or nothing and the text of its `SpecError`."""
    try:
        return action(), ""
    except SpecError as error:
        return None, str(error)


def resolves_or_refuses(tables: list[Any], known: CheckpointFacts) -> None:
    begin = time.thread_time()
    spec, error = caught(lambda: resolve(tables, PATH, known, format_table(known.format)))
    assert isinstance(spec, ModelSpec) or error.startswith(f"{PATH}: ")
    assert len(error) < 2000
    assert time.thread_time() - begin < SLOWEST


CASES = st.deferred(lambda: st.sampled_from([*cases(), *gguf_cases()]))
# Every format's words for the sizes of one family.
LLAMAS = st.sampled_from(["safetensors", "pickle", "gguf", "llama2c"]).map(
    lambda format: replace(facts(LLAMA | GGUF | LLAMA2C), format=format)
)
FEW = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
MANY = settings(FEW, max_examples=20_000)


def changed_family(data: st.DataObject) -> None:
    case: Case = data.draw(CASES)
    tables = copy.deepcopy(with_families({"family": case.family}, Path(PATH)))
    for _ in range(data.draw(st.integers(1, 4))):
        mutate(tables[data.draw(st.integers(0, len(tables) - 1))], data)
    resolves_or_refuses(tables, case.facts)


@FEW
@given(data=st.data())
def test_changed_families(data: st.DataObject) -> None:
    changed_family(data)


@pytest.mark.soak
@MANY
@given(data=st.data())
def test_many_changed_families(data: st.DataObject) -> None:
    changed_family(data)


PLACES = [
    ("dims", "hidden"), ("dims", "layers"), ("decoder", "layer"), ("decoder", "stem"),
    ("decoder", "head"), ("decoder", "pattern"), ("decoder", "layers"), ("engine", "slots"),
    ("decoder", "modules", "attn", "window"), ("decoder", "modules", "attn", "bias"),
    ("decoder", "modules", "attn", "position"), ("decoder", "modules", "ffn", "activation"),
    ("decoder", "modules", "attn", "position", "scaling"), ("modules", "logits", "tied"),
    ("tensors", "decoder.{i}.attn.{q,k,v}"), ("match", "when"), ("dtype",), ("decoder", "variants"),
]  # fmt: skip


@FEW
@given(place=st.sampled_from(PLACES), value=VALUES, known=LLAMAS)
def test_any_value_anywhere(place: tuple[str, ...], value: Any, known: CheckpointFacts) -> None:
    for key in reversed(place):
        value = {key: value}
    resolves_or_refuses([read_toml(families()["llama"]), value], known)


@FEW
@given(text=st.lists(WORDS | PIECES, max_size=8).map("".join) | st.text(max_size=30))
def test_any_override(text: str) -> None:
    override, error = caught(lambda: parse_override(text))
    assert override is not None or error.startswith("--set: ")
    resolves_or_refuses([merge(read_toml(families()["llama"]), override or {})], facts(LLAMA))


@FEW
@given(content=st.binary(max_size=60) | FORMULAS.map(lambda t: t.encode(errors="replace")))
def test_any_file(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "any.toml"
    path.write_bytes(content)
    table, error = caught(lambda: read_toml(path))
    if error:
        assert error.startswith(f"{path}: ")
    else:
        resolves_or_refuses([table], facts(LLAMA))
