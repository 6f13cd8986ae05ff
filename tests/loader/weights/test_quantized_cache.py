"""Many weights that are quantized as they are read are kept, and mapped at the next start."""

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jinfer import LLM
from jinfer.disk_cache import CacheOffError, NoCacheError
from jinfer.loader.checkpoint import open_checkpoint
from jinfer.loader.open_model import open_model
from jinfer.loader.weights import quantized_cache, storage_plan
from jinfer.loader.weights.load_weights import load
from jinfer.loader.weights.plan_weights import plan_weights
from jinfer.loader.weights.quantized_cache import key_of
from jinfer.nn.abstract_model import build_abstract_model
from tests.loader.checkpoint.converting import check_equal, leaves

GOLDENS = Path(__file__).parents[2] / "goldens"
MODEL = GOLDENS / "llama2"
Q4 = {"weights": "q4", "threshold": 0, "method": "mse"}
ONCE = "jinfer: weights are quantized, once; they are kept in "


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's, for small models too."""
    monkeypatch.setattr(quantized_cache, "cache_folder", lambda name: tmp_path / "weights")
    monkeypatch.setattr(quantized_cache, "_LEAST_WEIGHTS", 1)
    return tmp_path / "weights"


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Parameters of which nothing is kept."""

    def load(source: Path, **keys: Any) -> dict[str, Any]:
        with monkeypatch.context() as patch:
            patch.setattr(quantized_cache, "_LEAST_WEIGHTS", 1 << 40)
            return leaves(source, **keys)

    return load


def stop(*_: Any, **__: Any) -> None:
    raise AssertionError("this is not to be done again")


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama2", {}),
        ("llama2", {"method": "rtn", "outliers": 0.01}),
        ("gemma", {"weights": "q3.5"}),  # its head is its embedding
        ("mixtral", {"weights": "q6_b64"}),
        ("t5", {"weights": "q8"}),
        ("gguf_llama_mixed", {"weights": "q2"}),
    ],
)
def test_second_start_maps_the_cache_entry(
    name: str,
    keys: dict[str, Any],
    cache: Path,
    plainly: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = plainly(GOLDENS / name, **Q4 | keys)
    assert not cache.exists()
    check_equal(leaves(GOLDENS / name, **Q4 | keys), expected)
    assert capsys.readouterr().err == f"{ONCE}{cache}\n"
    monkeypatch.setattr(quantized_cache, "read", stop)
    check_equal(leaves(GOLDENS / name, **Q4 | keys), expected)
    assert capsys.readouterr().err == ""
    with pytest.raises(AssertionError, match="not to be done again"):
        leaves(GOLDENS / name, **Q4 | keys | {"weights": "q5"})


def test_a_damaged_entry_is_made_again(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = leaves(MODEL, **Q4)
    (found,) = cache.iterdir()
    (found / "model.safetensors").unlink()  # what is mapped stays as long as somebody knows it
    (found / "model.safetensors").write_bytes(b"")
    check_equal(leaves(MODEL, **Q4), expected)
    assert capsys.readouterr().err == 2 * f"{ONCE}{cache}\n"


def test_second_process_waits_for_the_first(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Threads here; the lock is the same."""
    finish, finished = quantized_cache.EntryWriter.finish, list[float]()

    def slow(writer: quantized_cache.EntryWriter) -> None:
        time.sleep(2)
        finish(writer)
        finished.append(time.monotonic())

    monkeypatch.setattr(quantized_cache.EntryWriter, "finish", slow)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: leaves(MODEL, **Q4), range(2))
    check_equal(first, second)
    assert len(finished) == 1
    assert "another process quantizes the same weights; waiting for it" in capsys.readouterr().err
    assert len(list(cache.iterdir())) == 1


def test_few_weights_are_quantized_each_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_cache, "_LEAST_WEIGHTS", 1 << 26)
    leaves(MODEL, **Q4)
    assert not cache.exists()


def test_weights_that_are_kept_as_they_are_need_no_entry(cache: Path) -> None:
    LLM(GOLDENS / "gguf_llama_mixed")
    LLM(MODEL)
    assert not cache.exists()


def test_one_of_several_processes_keeps_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jax.process_count", lambda: 2)
    leaves(MODEL, **Q4)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("refusal", "line"),
    [
        (CacheOffError("JINFER_CACHE=off"), ""),
        (
            NoCacheError("/x cannot be written to"),
            "jinfer: /x cannot be written to; weights are quantized at each start\n",
        ),
    ],
)
def test_no_folder(
    refusal: Exception,
    line: str,
    plainly: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(name: str) -> Path:
        raise refusal

    monkeypatch.setattr(quantized_cache, "cache_folder", refuse)
    check_equal(leaves(MODEL, **Q4), plainly(MODEL, **Q4))
    assert capsys.readouterr().err == line


def test_a_disk_that_fills_up(
    cache: Path,
    plainly: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(quantized_cache.EntryWriter, "finish", full)
    check_equal(leaves(MODEL, **Q4), plainly(MODEL, **Q4))
    output = capsys.readouterr().err
    assert output.startswith(f"{ONCE}{cache}\njinfer: ")
    assert output.endswith("No space left on device; weights are quantized at each start\n")
    assert output.count("\n") == 2
    assert list(cache.iterdir()) == []


def test_where_feedback_would_take_too_long(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jinfer.loader.weights.plan_weights._FEWEST", 0)
    monkeypatch.setitem(storage_plan.PER_WEIGHT, "gptq", 1.0)
    first = leaves(MODEL, **Q4 | {"method": "auto"})
    why, once = capsys.readouterr().err.splitlines()
    assert why.startswith("jinfer: GPTQ would take some ")
    assert once == f"{ONCE}{cache}"
    monkeypatch.setattr(quantized_cache, "read", stop)
    check_equal(leaves(MODEL, **Q4 | {"method": "auto"}), first)


def test_parameters_placed_one_by_one(cache: Path) -> None:
    keys = {f"quantization.{key}": value for key, value in Q4.items()}
    opened = open_model(GOLDENS / "gemma", {"dtype": "float32", **keys})
    model = build_abstract_model(opened.spec, "float32")
    plan = plan_weights(model, opened.spec, opened.checkpoint, opened.activations)
    found: Any = {}

    def put(names: Any, values: Any) -> None:
        found.update(dict.fromkeys(names, values))

    load(plan, put)
    assert len(list(cache.iterdir())) == 1
    for name, values in zip(model.names, load(plan), strict=True):
        for ours, expected in zip(
            jax.tree.leaves(found[name]), jax.tree.leaves(values), strict=True
        ):
            np.testing.assert_array_equal(ours, expected)


def test_key_depends_on_the_files_and_settings(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes((GOLDENS / "gguf_llama2" / "model.gguf").read_bytes())
    first = key_of(open_checkpoint(path), "a")
    assert first == key_of(open_checkpoint(path), "a") != key_of(open_checkpoint(path), "b")
    (tmp_path / "other.gguf").write_bytes(b"another file")
    assert key_of(open_checkpoint(path), "a") == first
    os.utime(path, (0, 0))
    assert key_of(open_checkpoint(path), "a") != first


def test_key_depends_on_files_next_to_an_index(tmp_path: Path) -> None:
    for path in MODEL.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    first = key_of(open_checkpoint(tmp_path))
    (weights,) = tmp_path.glob("*.safetensors")
    os.utime(weights, (0, 0))
    assert key_of(open_checkpoint(tmp_path)) != first
