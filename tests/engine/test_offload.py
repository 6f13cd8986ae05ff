"""Blocks that leave the device come back: the same bits, from memory, from disk, or not at all."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM, RequestError, SamplingParams
from jinfer.api.saved_cache import block_sizes, save_cache
from jinfer.engine.offload.cache_file import SavedBlock, read_cache_file
from jinfer.engine.offload.disk_store import FOLDER, DiskStore
from jinfer.engine.offload.prefix_offload import cache_identity
from jinfer.modelspec.spec_errors import SpecError
from jinfer.ops.attention.kv_cache import BLOCK
from tests.engine.tiny import held, open_model

GOLDENS = Path(__file__).parents[1] / "goldens"
RNG = np.random.default_rng(48)
PROMPT, OTHERS = RNG.integers(3, 250, 210).tolist(), RNG.integers(3, 250, (3, 180)).tolist()
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
SMALL: dict[str, Any] = {"engine.kv_tokens": 6 * BLOCK, "engine.slots": 2}
RAM = 4 / 1024  # GiB

pytestmark = pytest.mark.usefixtures("shared_programs")


def answer(llm: LLM, prompt: list[int] = PROMPT) -> tuple[list[int], int]:
    """Its tokens, and how many of the prompt were cached."""
    (done,) = llm.generate([prompt], SHORT)
    return done.token_ids, done.usage.cached_tokens


def full_blocks(llm: LLM, folder: Path) -> list[SavedBlock]:
    """What the cache has of the sequence that ended last; a block that is not full has old bits."""
    path, engine = folder / "slot", llm.session.engine
    assert save_cache(llm.session, path, 0).tokens
    identity = cache_identity(engine.runner.programs, engine.weights_key)
    found = list(read_cache_file(path, identity, block_sizes(engine)))
    return [one for one in found if len(one.tokens) == BLOCK]


def evict(llm: LLM) -> None:
    for other in OTHERS:
        answer(llm, other)


@pytest.mark.parametrize("kind", ["f32", "q4"])
def test_evicted_blocks_come_back_from_host_memory(tmp_path: Path, kind: str) -> None:
    with open_model(**SMALL, **{"engine.cache_ram": RAM, "quantization.kv_cache": kind}) as llm:
        first, _ = answer(llm)
        bits = full_blocks(llm, tmp_path)
        assert len(bits) == len(PROMPT) // BLOCK
        evict(llm)
        assert llm.stats().restored_blocks == 0
        again, cached = answer(llm)
        stats = llm.stats()
        assert again == first
        assert cached == len(PROMPT) // BLOCK * BLOCK
        assert stats.restored_blocks == len(PROMPT) // BLOCK
        assert full_blocks(llm, tmp_path) == bits
        assert 0 < stats.offload_ram_bytes <= RAM * 2**30
        assert stats.saved_blocks > stats.restored_blocks
        assert held(llm) == 0


def test_nothing_comes_back_without_a_store() -> None:
    with open_model(**SMALL) as llm:
        first, _ = answer(llm)
        evict(llm)
        assert answer(llm) == (first, 0)
        assert llm.stats().saved_blocks == 0


def test_a_restart_with_a_disk(tmp_path: Path) -> None:
    disk: dict[str, Any] = {"engine.cache_disk": str(tmp_path / "kept")}
    with open_model(**disk) as llm:
        first, cached = answer(llm)
        assert cached == 0
    files = sorted((tmp_path / "kept" / FOLDER).iterdir())
    assert len(files) == len(PROMPT) // BLOCK
    with open_model(**disk) as llm:
        assert answer(llm) == (first, len(PROMPT) // BLOCK * BLOCK)
        # What came back is an ordinary part of the prefix cache.
        assert answer(llm) == (first, len(PROMPT) - 1)
        assert llm.stats().restored_blocks == len(files)
    # Of another model, or in another format: not looked at.
    with open_model(**disk, **{"quantization.kv_cache": "f16"}) as llm:
        assert answer(llm)[1] == 0
    for path in files:
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        path.write_bytes(damaged)
    with open_model(**disk) as llm:
        assert answer(llm) == (first, 0)
        assert llm.stats().lost_blocks == 1


def test_a_slow_disk_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk: dict[str, Any] = {"engine.cache_disk": str(tmp_path), "engine.slots": 2}
    with open_model(**disk) as llm:
        first, _ = answer(llm)
    reads, go = threading.Event(), threading.Event()
    get = DiskStore.get

    def slow(store: DiskStore, key: str, nbytes: int) -> bytes | None:
        reads.set()
        assert go.wait(60)
        return get(store, key, nbytes)

    monkeypatch.setattr(DiskStore, "get", slow)
    with open_model(**disk) as llm:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(answer(llm)))
        thread.start()
        assert reads.wait(60)
        answer(llm, OTHERS[0])
        cancelled = llm.stream(PROMPT, SHORT)
        threading.Timer(0.05, go.set).start()
        next(cancelled)
        cancelled.close()
        thread.join()
        assert results == [(first, len(PROMPT) // BLOCK * BLOCK)]
        assert held(llm) == 0


def test_windows_and_states_come_back(tmp_path: Path) -> None:
    for name, tokens in (("gemma2", 200), ("lfm2", 255)):
        prompt = RNG.integers(3, 250, tokens).tolist()
        asked: dict[str, Any] = {"dtype": "float32", "engine.cache_disk": str(tmp_path / name)}
        with LLM(GOLDENS / name, **asked) as llm:
            # Where two prompts part, a snapshot of the states is left.
            same = [*prompt[:192], *reversed(prompt[:20])]
            first, _ = answer(llm, prompt)
            answer(llm, same)
        with LLM(GOLDENS / name, **asked) as llm:
            assert answer(llm, prompt) == (first, 192), name


def test_a_cache_is_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    with open_model() as llm:
        first, _ = answer(llm)
        saved = llm.save_cache(path)
        # The last token of an answer is not computed.
        assert (saved.tokens, saved.nbytes) == (len(PROMPT) + 3, path.stat().st_size)
    with open_model() as llm:
        assert llm.load_cache(path) == saved
        assert answer(llm) == (first, len(PROMPT) - 1)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with open_model() as llm:
        assert 0 < llm.load_cache(path).tokens < saved.tokens
        assert answer(llm)[0] == first
        path.write_bytes(b"something else")
        with pytest.raises(RequestError, match="is no saved cache"):
            llm.load_cache(path)
        with pytest.raises(RequestError, match="cannot be read: No such file"):
            llm.load_cache(tmp_path / "missing")
        with pytest.raises(RequestError, match="cannot be written: No such file"):
            llm.save_cache(tmp_path / "missing" / "cache")
    with open_model(**SMALL, **{"quantization.kv_cache": "q8"}) as llm:
        path.write_bytes(data)
        with pytest.raises(RequestError, match="was saved with another model"):
            llm.load_cache(path)


def test_weights_that_change_leave_nothing(tmp_path: Path) -> None:
    with open_model(
        **SMALL, **{"engine.cache_ram": RAM, "engine.cache_disk": str(tmp_path)}
    ) as llm:
        answer(llm)
        evict(llm)
        name = "decoder.0.attn.q.weight"
        llm.update_weights({name: llm.weights[name].values * 1.5})
        assert llm.stats().offload_ram_bytes == 0
        assert answer(llm)[1] == 0
        evict(llm)
        assert answer(llm)[1] == len(PROMPT) // BLOCK * BLOCK


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"engine.cache_ram": 999999}, "engine.cache_ram: 999999 GiB are more than the .* machine"),
        (
            {"engine.cache_disk": "/proc/kept"},
            "engine.cache_disk: /proc/kept/jinfer-prefix-cache cannot be used",
        ),
    ],
)
def test_what_cannot_be_had(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        open_model(**asked)


SERVER = """
import sys
from tests.engine.test_offload import answer, opened_on, shuffled
with opened_on(sys.argv[1]) as llm:
    while True:
        for prompt in shuffled(int(sys.argv[2])):
            print("answers", flush=True)
            answer(llm, prompt)
"""


def shuffled(seed: int) -> list[list[int]]:
    """The same prompts in another order."""
    prompts = np.random.default_rng(9).integers(3, 250, (14, 210))
    mixed: list[list[int]] = np.random.default_rng(seed).permutation(prompts).tolist()
    return mixed


def opened_on(folder: str) -> LLM:
    """A model whose disk has room for ten of the prompts."""
    size = 30 * 100_000 / 2**30
    return open_model(**SMALL, **{"engine.cache_disk": folder, "engine.cache_disk_size": size})


@pytest.mark.soak
def test_an_engine_that_is_killed_often(tmp_path: Path) -> None:
    """Whenever it is killed, what the next one finds gives the same answers."""
    with open_model(**SMALL) as llm:
        right = {tuple(prompt): answer(llm, prompt)[0] for prompt in shuffled(0)}
    rng, root, found = np.random.default_rng(4), Path(__file__).parents[2], 0
    for number in range(100):
        asked = [sys.executable, "-c", SERVER, str(tmp_path), str(number)]
        with subprocess.Popen(asked, cwd=root, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            for _ in range(rng.integers(1, 8)):  # answers, the last of which is interrupted
                assert server.stdout.readline() == b"answers\n"
            time.sleep(rng.random() * 0.05)
            server.send_signal(signal.SIGKILL)
        with opened_on(str(tmp_path)) as llm:
            for prompt in shuffled(number)[:4]:
                got, cached = answer(llm, prompt)
                assert got == right[tuple(prompt)]
                found += cached
    assert found > 100 * 192
