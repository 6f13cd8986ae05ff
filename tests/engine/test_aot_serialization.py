"""A second start: programs come as bytes, with neither a trace nor Flax, and give equal results."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest

from jinfer import LLM, SamplingParams
from jinfer.cpu import build_library
from jinfer.disk_cache import DiskCache
from jinfer.engine.runner import compiled_programs, program_cache
from jinfer.engine.runner.aot_serialization import dumped, loaded
from jinfer.engine.runner.compiled_programs import CompiledPrograms
from jinfer.engine.runner.step_key import StepKey

GOLDENS = Path(__file__).parents[1] / "goldens"
PROMPT = [5, 9, 2, 77, 31]
TEXTS = [PROMPT, [8, 3]]
WIDTH = StepKey("forward", 1, rows=1, want="hidden")  # asked for its result's shape, not compiled
FEW = {"engine.slots": 1, "engine.prefill_chunk": 8}  # programs, where it matters not which
EVERY: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=6, ignore_eos=True),
    "drawn": SamplingParams(max_tokens=6, temperature=0.9, typical_p=0.9, seed=3, logprobs=2),
    "beam": SamplingParams(max_tokens=4, strategy="beam", beams=2),
    "contrastive": SamplingParams(max_tokens=4, strategy="contrastive", top_k=3),
}


@pytest.fixture
def stored(tmp_path: Path) -> DiskCache:
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    return DiskCache(folder, "a version")


def results(
    stored: DiskCache, golden: str, strategies: tuple[str, ...] = tuple(EVERY), **overrides: Any
) -> tuple[list[Any], set[str]]:
    """What a model gives, and the kinds of programs that were traced for it."""
    traced: set[str] = set()
    function = CompiledPrograms.step_function

    def note(self: CompiledPrograms, shape: StepKey) -> Any:
        if shape != WIDTH:
            traced.add(shape.kind)
        return function(self, shape)

    with (
        pytest.MonkeyPatch.context() as patch,
        LLM(GOLDENS / golden, **{"engine.slots": 4, **overrides}) as llm,
    ):
        llm.session.engine.runner.programs.program_cache = stored
        patch.setattr(CompiledPrograms, "step_function", note)
        found: list[Any] = []
        if llm.spec.decoder is not None:
            for name in strategies:
                for text in TEXTS:  # together they take turns that differ from time to time
                    one = llm.generate([text], EVERY[name])[0]
                    found.append((one.token_ids, one.logprobs))
            # Its first block is copied, as it fits in part.
            found.append(llm.generate([[*PROMPT, 7, 7]], EVERY["greedy"])[0].token_ids)
        if llm.spec.type == "decoder-only" and len(strategies) > 1:
            found += llm.score(TEXTS)
        if llm.spec.type != "encoder-decoder":
            found += llm.logits(TEXTS)
    return found, traced


def same(first: list[Any], second: list[Any]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_equal(one, other)


@pytest.mark.parametrize(
    ("golden", "overrides", "kinds"),
    [
        (
            "llama2",
            {"quantization.weights": "q4", "quantization.kv_cache": "q3.5"},
            "logits sample decode forward score beam contrastive copy_blocks set_slot",
        ),
        ("t5", {}, "decode beam contrastive fill_cross_attention set_slot"),
        ("bert", {}, "encode"),
    ],
)
def test_a_second_start_traces_nothing(
    stored: DiskCache, golden: str, overrides: dict, kinds: str
) -> None:
    first, made = results(stored, golden, **overrides)
    assert made >= set(kinds.split())
    second, traced = results(stored, golden, **overrides)
    assert traced == set()
    same(first, second)


def test_where_jax_calls_them(stored: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    usual = results(stored, "llama2", ("drawn",), **FEW)[0]
    monkeypatch.setattr("jinfer.engine.runner.aot_serialization._is_cpu", lambda: False)
    called, traced = results(stored, "llama2", ("drawn",), **FEW)
    assert traced == set()
    same(usual, called)


def test_damaged_programs_are_made_again(stored: DiskCache) -> None:
    """Every other one is cut, in the rest a bit is another one."""
    first, made = results(stored, "llama2", ("greedy",), **FEW)
    before = sorted(path.name for path in stored.folder.iterdir())
    for number, name in enumerate(before):
        content = bytearray((stored.folder / name).read_bytes())
        content[len(content) // 2] ^= number % 2
        (stored.folder / name).write_bytes(content if number % 2 else content[:-100])
    again, traced = results(stored, "llama2", ("greedy",), **FEW)
    same(first, again)
    assert traced == made
    assert sorted(path.name for path in stored.folder.iterdir()) == before
    assert results(stored, "llama2", ("greedy",), **FEW)[1] == set()


@pytest.mark.parametrize("which", ["dumped", "loaded"])
def test_what_cannot_be_kept_is_left_to_jax(
    stored: DiskCache, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a version of JAX that looks another way inside."""
    before = results(stored, "llama2", ("greedy",), **FEW)[0] if which == "loaded" else None
    monkeypatch.setattr(compiled_programs, which, lambda _: None)
    first, made = results(stored, "llama2", ("greedy",), **FEW)
    second, traced = results(stored, "llama2", ("greedy",), **FEW)
    assert made == traced != set()
    same(first, second)
    if before is not None:
        same(before, first)
    sizes = {path.stat().st_size for path in stored.folder.iterdir()}
    assert sizes == {32}  # nothing but their hashes


def test_what_programs_depend_on(stored: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each difference is another key."""
    with LLM(GOLDENS / "llama2") as llm, LLM(GOLDENS / "llama31") as other:
        own = llm.session.engine.runner.programs

        def key(of: CompiledPrograms = own, kind: Any = "copy_blocks") -> str:
            vars(of).pop("_described", None)
            return of._cache_entry(StepKey(kind))

        keys = [key(), key(kind="set_slot"), key(other.session.engine.runner.programs)]
        for overrides in (
            {"engine.slots": 2},
            {"engine.context": 64},
            {"quantization.kv_cache": "q8"},
            {"quantization.weights": "q4"},
            {"dtype": "bfloat16"},
        ):
            with LLM(GOLDENS / "llama2", **overrides) as changed:
                keys.append(key(changed.session.engine.runner.programs))
        monkeypatch.setattr(program_cache, "library_key", lambda: "another library")
        keys.append(key())
        monkeypatch.setattr(program_cache, "cores", lambda: 77)
        keys.append(key())
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        keys.append(key())
        assert len(set(keys)) == len(keys)
        assert not any(" at 0x" in one for one in keys)


def test_what_cannot_be_read_is_no_program(stored: DiskCache) -> None:
    for content in (b"", b"\x02" + bytes(7) + b"{}", bytes(100), b"\xff" * 100):
        assert loaded(content) is None


def test_what_cannot_be_written_is_not_kept() -> None:
    assert dumped(cast("Any", object())) is None


def test_without_what_it_calls_a_program_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(GOLDENS / "llama2") as llm:
        function, donated, arguments = llm.session.engine.runner.programs.step_function(
            StepKey("copy_blocks")
        )
        lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
        content = dumped(program_cache.compiled_apart(lowered))
    assert content is not None
    assert loaded(content) is not None
    monkeypatch.setattr(
        "jinfer.engine.runner.aot_serialization.register_calls", lambda names: False
    )
    assert loaded(content) is None


START = """
import sys
from jinfer import LLM
llm = LLM(sys.argv[1], first=lambda llm: [1] * 5)
print(llm.generate([[1, 2, 3, 4, 5]], max_tokens=3, temperature=0, ignore_eos=True)[0].token_ids)
print(*(name for name in sys.argv[2:] if name in sys.modules))
"""
# What traces and lowers, and what only type checkers need.
LEFT_OUT = ("flax", "jaxlib.mlir.dialects.mhlo", "jax.experimental.pallas", "jaxtyping")


@pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")
def test_a_process_that_starts_again_imports_less(tmp_path: Path) -> None:
    library = build_library.library_path()
    kept = shutil.copytree(library.parent, tmp_path / "libraries" / library.parent.name)
    for path in (kept.parent, kept, kept / library.name):
        path.chmod(0o700)
    environment = {name: value for name, value in os.environ.items() if "JAX_" not in name}
    said = [
        subprocess.run(
            [sys.executable, "-c", START, str(GOLDENS / "llama2"), *LEFT_OUT],
            env={**environment, "JINFER_CACHE": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for _ in range(2)
    ]
    assert said[0][0] == said[1][0]
    assert said[0][1].split()[:2] == ["flax", "jaxlib.mlir.dialects.mhlo"]
    assert said[1][1] == ""
