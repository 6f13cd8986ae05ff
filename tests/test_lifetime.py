"""A model that ends gives all back: memory, its thread, its bound on threads."""

import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jinfer import LLM, AsyncLLM, RequestError
from jinfer.cpu import build_library

ROOT = Path(__file__).parents[1]
SPEC = str(ROOT / "specs" / "smollm2_135m_instruct.toml")
LLAMA2 = ROOT / "tests" / "goldens" / "llama2"
GGUF = ROOT / "tests" / "goldens" / "gguf_qwen15" / "model.gguf"


def engines() -> int:
    """Models that run, beside those that other tests have left."""
    return len(threads() - _others)


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "jinfer-engine"}


_others: set[threading.Thread] = set()


def comes(true: Callable[[], bool]) -> bool:
    """Whether something becomes true soon."""
    end = time.monotonic() + 20
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


@pytest.fixture
def ids() -> Iterator[list[int]]:
    gc.collect()
    _others.update(threads())
    yield [1, 5, 9]
    assert comes(lambda: engines() == 0)


def test_a_closed_model_says_so(ids: list[int]) -> None:
    with LLM(LLAMA2) as llm:
        llm.generate(ids, max_tokens=2)
        assert engines() == 1
    assert engines() == 0
    for use in (
        lambda: llm.generate(ids),
        lambda: list(llm.stream(ids)),
        lambda: llm.logits([ids]),
        lambda: llm.hidden([ids]),
        lambda: llm.score([ids]),
    ):
        with pytest.raises(RequestError, match=r"^the model was closed; open it again$"):
            use()
    llm.close()
    assert repr(llm).startswith("LLM(llama2")
    assert not llm._engine.runner.leaves


def test_a_model_that_was_never_used_gives_its_weights_back(ids: list[int]) -> None:
    llm = LLM(LLAMA2)
    engine = llm._engine
    del llm
    assert comes(lambda: not engine.runner.leaves)


def test_a_loaded_model_lets_its_file_go() -> None:
    with LLM(GGUF) as llm:
        file = llm.session.opened.checkpoint
        assert (dict(file.tensors), dict(file.metadata)) == ({}, {})
        assert len(llm.generate([[1, 5, 9]], max_tokens=2)[0].token_ids) == 2
        maps = Path("/proc/self/maps")
        assert not maps.exists() or str(GGUF) not in maps.read_text()


def test_a_forgotten_model_ends_its_thread(ids: list[int]) -> None:
    llm = LLM(LLAMA2)
    llm.generate(ids, max_tokens=2)
    engine = llm._engine
    gc.disable()  # references alone decide
    try:
        del llm
        assert comes(lambda: engines() == 0)
        assert comes(lambda: not engine.runner.leaves)
    finally:
        gc.enable()


def test_what_comes_as_it_closes_has_an_answer(ids: list[int]) -> None:
    llm = LLM(LLAMA2)
    began, end = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def busy(engine: object) -> None:
        began.set()
        end.wait(20)

    def ask() -> None:
        try:
            llm.logits([ids])
        except RequestError as error:
            errors.append(error)

    threads = [
        threading.Thread(target=lambda: llm.session.thread.run(busy)),
        threading.Thread(target=ask),
        threading.Thread(target=llm.close),
    ]
    for thread in threads:
        thread.start()
        assert began.wait(20)
        time.sleep(0.05)
    end.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert [str(error) for error in errors] == ["the model was closed; open it again"]


LAST = """
import sys
from jinfer import LLM

def work():
    llm = LLM(sys.argv[1])
    engine = llm._engine
    llm.generate([1, 5, 9], max_tokens=2)
    release = engine.release

    def slow():
        import time
        time.sleep(1)
        release()
        print("released", flush=True)

    engine.release = slow

work()
"""


def test_a_model_forgotten_at_the_end_of_a_program_ends_before_it() -> None:
    """A thread that frees memory while the interpreter ends would abort the process."""
    done = subprocess.run(
        [sys.executable, "-c", LAST, str(LLAMA2)], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "released\n", "")


MEMORY = """
import json, sys, threading, time
from jinfer import LLM

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

seen, opened = [], []
for _ in range(int(sys.argv[3])):
    llm = LLM(sys.argv[1])
    llm.generate("Hello", max_tokens=4)
    opened.append(resident())
    if sys.argv[2] == "close":
        llm.close()
    else:
        del llm
        # The thread gives the memory back, and then ends.
        while any(thread.name == "jinfer-engine" for thread in threading.enumerate()):
            time.sleep(0.01)
    seen.append(resident())
print(json.dumps([opened, seen]))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(
    ("how", "count"),
    [
        ("forget", 5),
        pytest.param("forget", 20, marks=pytest.mark.soak),
        pytest.param("close", 10, marks=pytest.mark.soak),
    ],
)
def test_models_one_after_another_take_no_more_memory(how: str, count: int) -> None:
    """The weights alone are 90 MiB, five times 450; the first time, code and libraries stay."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, SPEC, how, str(count)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    opened, seen = json.loads(done.stdout)
    assert max(seen) < seen[0] + 150, (opened, seen)
    assert sum(seen) < sum(opened) - 60 * count, (opened, seen)


def test_reprs_are_short(ids: list[int]) -> None:
    with LLM(SPEC, threads=2) as llm:
        assert repr(llm) == "LLM(smollm2_135m_instruct, llama, 135M parameters, q4_1, context 4096)"
        assert repr(AsyncLLM(llm)) == f"Async{llm!r}"
        (answer,) = llm.generate("The capital of France is", max_tokens=2)
        assert repr(answer) == "Completion(' Paris.', 2 tokens, 'length')"
        bare = replace(answer, text="", token_ids=[5, 6, 7])
        assert repr(bare) == "Completion([5, 6, 7], 3 tokens, 'length')"
    with LLM(LLAMA2) as llm:
        assert repr(llm) == "LLM(llama2, 155K parameters, f16, context 256)"
    assert repr(llm) == "LLM(llama2, 155K parameters, f16, context 256, closed)"


def limit() -> int:
    library = build_library.opened_already()
    assert library is not None
    now = library.jinfer_limit_threads(1)
    library.jinfer_limit_threads(now)
    return now


@pytest.mark.skipif(not build_library.available(), reason="there are no custom calls here")
def test_the_least_bound_on_threads_counts_while_its_model_is_open() -> None:
    before = limit()
    with LLM(LLAMA2, threads=3000):
        assert limit() == before
        with LLM(LLAMA2, threads=1):
            assert limit() == 1
        assert limit() == before
        forgotten = LLM(LLAMA2, threads=1)
        assert limit() == 1
        del forgotten
        assert limit() == before


@pytest.mark.parametrize("threads", [0, -1, True, 2**40, "a", 1.5])
def test_a_wrong_number_of_threads(threads: Any) -> None:
    with pytest.raises(RequestError, match=r"; give how many cores may compute, from 1$"):
        LLM(LLAMA2, threads=threads)


FORKED = """
import os, sys, warnings
warnings.simplefilter("ignore")
from jinfer import LLM
from jinfer.api.user_errors import USER_ERRORS

llm = LLM(sys.argv[1])
llm.generate([1, 5, 9], max_tokens=2)
uses = (
    lambda: llm.generate([1, 5], max_tokens=2),
    lambda: llm.logits([[1, 5]]),
    lambda: LLM(sys.argv[1]),
)
for use in uses:
    if not (child := os.fork()):
        try:
            use()
        except USER_ERRORS as error:
            os._exit(7 if "was forked" in str(error) else 8)
        os._exit(9)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(len(llm.generate([1, 5, 9], max_tokens=2)[0].token_ids))
"""


def test_a_forked_process_says_so_and_does_not_wait() -> None:
    command = [sys.executable, "-c", FORKED, str(LLAMA2)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout.split() == ["7", "7", "7", "2"], done.stderr


THREADS = """
import json, os, sys
from jinfer import LLM

def worked():
    times = {}
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/stat") as file:
            name, rest = file.read().split("(", 1)[1].rsplit(")", 1)
        times[name + task] = sum(map(int, rest.split()[11:13]))
    return times

llm = LLM(sys.argv[1], threads=1)
llm.generate("Hello", max_tokens=4)
before = worked()
llm.generate("Hello", max_tokens=60, ignore_eos=True)
after = worked()
spent = {name: after[name] - before.get(name, 0) for name in after}
print(json.dumps([spent, "NPROC" in os.environ]))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")
def test_one_thread_computes_where_one_was_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADS, SPEC], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    spent, told = json.loads(done.stdout)
    pool = [name for name in spent if name.startswith("tf_XLAEigen")]
    assert len(pool) == 1
    assert not told
    total = sum(spent.values())
    assert total > 5  # hundredths of a second
    # Beside Python's thread, which launches, it computes, or XLA's that it was launched on.
    busy = {name for name in spent if spent[name] > total / 10}
    computing = {name for name in busy if not name.startswith(("python", "jinfer"))}
    assert computing
    assert all(name in pool or name.startswith("tf_XLAExecute") for name in computing)
