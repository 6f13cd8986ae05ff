"""Keys of config.json at values that goldens do not have: logits are those of transformers."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer.loader.open_model import open_model
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_files import families, read_toml
from tests.families import second_checkpoints as second
from tests.families import test_architectures as architectures

GOLDENS = Path(__file__).parents[1] / "goldens"
UNHELD = Path(__file__).with_name("unheld_keys.json")
KEY = re.compile(r"\$(\w+(?:\.\w+)*)")
# As good as not there: what does nothing in most keys.
_OFF: tuple[Any, ...] = (None, False, 0, 0.0, 1, 1.0, [], {})
OFF: set[str] = {json.dumps(value) for value in _OFF}
# Rounding is magnified: of T5's own reference in float32 it is 7e-4, of Zamba2's 1e-4.
ROUNDED = {"t5": 3e-3, "zamba2": 1e-3, "qwen3_next": 6e-4}


@pytest.mark.parametrize("name", second.names())
def test_logits_of_a_second_checkpoint(name: str, tmp_path: Path) -> None:
    assert second.difference(name, tmp_path) < ROUNDED.get(name, 2e-4)


def test_the_page_has_every_key() -> None:
    rows = second.PAGE.read_text(encoding="utf-8").removeprefix(second.HEAD).splitlines()
    assert [row.rsplit(" ", 2)[0] for row in rows] == [*second.lines()]


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("granite_moe_hybrid", {"time_step_limit": [0.01, 0.1]}),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}),
        ("nemotron_h", {"moe_latent_size": 8}),
        ("bloom", {"slow_but_exact": True}),
        ("lfm3", {"use_attention_gate": False}),
        ("olmoe", {"clip_qkv": 0.5}),
    ],
)
def test_keys_that_are_not_followed_are_refused(
    family: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    made = next(made for name in second.names() if (made := second.made(name))["family"] == family)
    second.write(tmp_path, made | {"config": made["config"] | changed})
    with pytest.raises(SpecError, match=f"{next(iter(changed))}: .* is not followed"):
        open_model(tmp_path, {})


def test_every_key_that_a_family_reads_has_two_values() -> None:
    """Among the checkpoints of a family or of those over it, but for those in the file.

    The file has names that other programs give the same value, and keys that transformers does not
    read or has one value of. A new one is a reason to make another checkpoint.
    """
    assert unheld() == json.loads(UNHELD.read_text())


def unheld() -> dict[str, list[str]]:
    """Keys that a family's own file reads and that have one value in all checkpoints of it."""
    tables = {name: read_toml(path) for name, path in families().items()}
    of = {
        arch: name
        for name in tables
        for arch in tables[name].get("match", {}).get("architectures", [])
    }
    found: dict[str, list[dict[str, set[str]]]] = {name: [] for name in tables}
    for config in _configs():
        values: dict[str, set[str]] = {}
        for key, value in _leaves(config):
            for alias in {key, key.rpartition(".")[2]}:
                values.setdefault(alias, set()).add(_value(value))
        family = next((of[a] for a in config.get("architectures", []) if a in of), None)
        while family:
            found[family].append(values)
            family = tables[family].get("family")
    gguf = _gguf_keys()
    one = {
        name: sorted(
            key
            for key in _keys(tables[name]) - gguf
            if len(set().union(*(each.get(key, {"null"}) for each in found[name]))) < 2
        )
        for name in tables
        if found[name]
    }
    return {name: keys for name, keys in one.items() if keys}


def _keys(table: Mapping[str, Any]) -> set[str]:
    """Those that expressions look up in config.json."""
    others = ("gguf", "llama2c", "tensors", "match")
    return set(KEY.findall(json.dumps({k: v for k, v in table.items() if k not in others})))


def _gguf_keys() -> set[str]:
    """Keys of converted files, of which a family reads some beside config.json's."""
    files = json.loads(Path(__file__).with_name("gguf_headers.json").read_text())
    names = set(re.findall(r'"([\w.]+)":', json.dumps(files)))
    return {part for name in names for part in (name, name.partition(".")[2])}


def _configs() -> Iterator[dict[str, Any]]:
    for path in sorted(GOLDENS.glob("*/config*.json")):
        yield json.loads(path.read_text())
    with np.load(Path(__file__).with_name("transformers_logits.npz")) as stored:
        for key in stored:
            if key.endswith(".made"):
                yield json.loads(str(stored[key]))["config"]
    for name in second.names():
        yield second.made(name)["config"]
    for name in architectures.NAMES:
        yield architectures.made(name)["config"]


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")


def _value(value: Any) -> str:
    text = json.dumps(value)
    return "null" if text in OFF else text
