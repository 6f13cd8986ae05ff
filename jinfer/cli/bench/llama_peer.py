"""llama.cpp as a benchmark peer, through `llama_cpp`'s C functions; imports nothing of jinfer.

This file is run by its path (`command`), in a Python that has llama-cpp-python and need not be
jinfer's. It reads a request in JSON from standard input and writes arrays to a file; or, given the
name of a model, it measures the tasks of standard input.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

PROMPT = 16  # tokens before decoding begins
STEPS = 48  # tokens decoded in a measurement
PROMPTS = 512  # tokens of prompts in one, which may be several: a short one takes 30 ms
KINDS = ("decode", "sample", "prefill", "deep")  # what can be measured
BATCH = 2048  # most tokens of a call
# Sampling parameters: the defaults of llama.cpp's own server.
DRAWN = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_ILLEGAL = (-signal.SIGILL, 128 + signal.SIGILL)  # exit statuses: of a child, through a shell


def command(python: str, *arguments: str) -> list[str]:
    """The command that runs this file in a Python.

    With -P, because files in its folder shadow standard modules.
    """
    return [python, "-P", os.path.abspath(__file__), *arguments]


def ask(python: str, request: dict[str, Any]) -> None:
    """Run a request in llama.cpp's own process. Raises `OSError` with its error output."""
    text = json.dumps(request)
    done = subprocess.run(command(python), input=text, text=True, capture_output=True, check=False)
    if done.returncode in _ILLEGAL:
        raise OSError(f"llama.cpp ended{ending_hint(done.returncode)}")
    if done.returncode:
        raise OSError(done.stderr.strip().splitlines()[-1] if done.stderr else "llama.cpp ended")


def ending_hint(status: int) -> str:
    """What to do about a process of llama.cpp that ended with an exit status, after "; "."""
    if status in _ILLEGAL:
        return (
            "; an illegal instruction: with AMX, GCC 12 drops the stores that fill llama.cpp's "
            "tile configuration; build it with a compiler barrier before _tile_loadconfig, as "
            '"How to repeat them" in docs/benchmarks.md says'
        )
    return "; --peer-python has to name a Python with llama-cpp-python"


class Llama:
    """A model and a context.

    Attributes:
        vocab: vocabulary size.
    """

    def __init__(self, model: str, context: int, sequences: int, threads: int = 0) -> None:
        import llama_cpp

        self.api = llama_cpp
        silence(llama_cpp)
        parameters = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), parameters)
        if not self.model:
            raise OSError(f"{model}: llama.cpp cannot load it")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = context, BATCH, 512
        # Of the machine's cores perhaps not all are this process's.
        allowed = getattr(os, "sched_getaffinity", None)
        threads = threads or (len(allowed(0)) if allowed else os.cpu_count() or 1)
        settings.n_seq_max, settings.kv_unified = sequences, True
        settings.n_threads = settings.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, sequences)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def forget(self) -> None:
        """Clears the KV cache."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def decode(self, tokens: Sequence[tuple[int, int, int, bool]]) -> None:
        """Computes (token, position, sequence, whether its logits are needed)."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, needed) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, needed
        if self.api.llama_decode(self.context, batch) != 0:
            raise OSError("llama_decode failed")

    def logits(self, row: int) -> Any:
        """Logits after token `row` of the last batch: float32 [vocab], a view."""
        import numpy as np

        pointer = self.api.llama_get_logits_ith(self.context, row)
        return np.ctypeslib.as_array(pointer, (self.vocab,))

    def sampler(self) -> Callable[[int], int]:
        """Samples the token after token `row` of the last batch."""
        api = self.api
        chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        stages = (
            api.llama_sampler_init_top_k(int(DRAWN["top_k"])),
            api.llama_sampler_init_top_p(DRAWN["top_p"], 1),
            api.llama_sampler_init_min_p(DRAWN["min_p"], 1),
            api.llama_sampler_init_temp(DRAWN["temperature"]),
            api.llama_sampler_init_dist(1),
        )
        for stage in stages:
            api.llama_sampler_chain_add(chain, stage)
        return lambda row: int(api.llama_sampler_sample(chain, self.context, row))

    def greedy(self, row: int) -> int:
        """The most likely token after token `row` of the last batch."""
        return int(self.logits(row).argmax())


_callbacks: list[Any] = []  # must live as long as the library


def silence(api: Any) -> None:
    """Turns off llama.cpp's progress output."""
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    _callbacks.append(kind(lambda level, text, data: None))
    api.llama_log_set(_callbacks[-1], None)
    api.llama_backend_init()


def quantize(api: Any, source: str, out: str, type_name: str, imatrix: str | None = None) -> None:
    """Write a GGUF file in another type, such as "Q3_K_M"; llama.cpp picks each tensor's type.

    Args:
        imatrix: a .npz file (`jinfer.cli.quantize.importance_matrix`), the mean squares of the
            inputs of each tensor by its name.
    """
    parameters = api.llama_model_quantize_default_params()
    parameters.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{type_name}")
    held = None if imatrix is None else _imatrix(api, imatrix)
    if held is not None:
        parameters.imatrix = held[1]
    if api.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(parameters)) != 0:
        raise OSError(f"{source}: llama.cpp cannot quantize it to {type_name}")


def _imatrix(api: Any, file: str) -> tuple[dict[str, Any], Any]:
    """A file's arrays, and llama.cpp's entries, the last one without a name.

    Entries point to the arrays, which have to live as long.
    """
    import numpy as np

    with np.load(file) as found:
        squares = {name: np.ascontiguousarray(found[name], np.float32) for name in found}
    entries = (api.llama_model_imatrix_data * (len(squares) + 1))()
    for entry, (name, values) in zip(entries, squares.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    return squares, entries


def _score(request: dict[str, Any]) -> None:
    """Write the log-probabilities of windows' tokens, and all logits of some of them."""
    import numpy as np

    llama = Llama(request["model"], request["length"], 1)
    losses, logits = [], []
    for number, (ids, first) in enumerate(request["windows"]):
        llama.forget()
        llama.decode([(token, i, 0, i >= first - 1) for i, token in enumerate(ids)])
        rows = np.stack([llama.logits(i) for i in range(first - 1, len(ids) - 1)])
        if number < request["with_logits"]:
            logits.append(rows)
        top = rows.max(axis=1, keepdims=True)
        logsum = np.log(np.exp(rows - top).sum(axis=1)) + top[:, 0]
        losses.append(logsum - rows[np.arange(len(rows)), ids[first:]])
    size = os.path.getsize(request["model"])
    empty = np.zeros((0, llama.vocab), np.float32)
    np.savez(request["out"], losses=np.concatenate(losses), size=size,
             logits=np.concatenate(logits) if logits else empty)  # fmt: skip


def _tokenize(request: dict[str, Any]) -> None:
    """Write token ids of texts, with and without parsing special tokens, and EOG tokens."""
    import llama_cpp

    silence(llama_cpp)
    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(request["model"].encode(), parameters)
    if not model:
        raise OSError(f"{request['model']}: llama.cpp cannot load it")
    vocab = llama_cpp.llama_model_get_vocab(model)

    def ids(text: str, parse_special: bool) -> list[int]:
        data = text.encode()
        room = 4 * len(data) + 16
        found = (llama_cpp.llama_token * room)()
        size = llama_cpp.llama_tokenize(vocab, data, len(data), found, room, False, parse_special)
        if size < 0:
            raise OSError(f"{request['model']}: llama_tokenize failed on {text!r}")
        return list(found[:size])

    every = range(llama_cpp.llama_vocab_n_tokens(vocab))
    answer = {
        "plain": [ids(text, False) for text in request["texts"]],
        "parsed": [ids(text, True) for text in request["texts"]],
        "ends": [id for id in every if llama_cpp.llama_vocab_is_eog(vocab, id)],
    }
    with open(request["out"], "w", encoding="utf-8") as file:
        json.dump(answer, file)


class BenchEngine(Protocol):
    """The interface of an engine under test."""

    def run(self, prompt: int, rows: int, steps: int = 0, *, drawn: bool = False) -> float:
        """Seconds to compute prompts and then so many tokens of each, greedy or sampled."""

    def timed(self, prompt: int, rows: int, steps: int, *, drawn: bool = False) -> float:
        """Seconds of the decoding alone, or of the prefill if there are no steps."""


def answer_tasks(start: Callable[[], BenchEngine]) -> int:
    """Measure the tasks of standard input, one per line, such as "decode 4".

    "deep 7900" decodes one sequence after a prompt of so many tokens.
    """
    engine = start()
    engine.run(1, 1)
    print(json.dumps({"kinds": KINDS}), flush=True)
    for line in sys.stdin:
        kind, size = line.split()
        prompt, rows = (int(size), 1) if kind in ("prefill", "deep") else (PROMPT, int(size))
        steps = 0 if kind == "prefill" else STEPS
        times = 1 if steps else max(1, PROMPTS // prompt)
        drawn = kind == "sample"
        seconds = sum(engine.timed(prompt, rows, steps, drawn=drawn) for _ in range(times))
        tokens = rows * steps if steps else prompt * times
        print(json.dumps({"rate": tokens / seconds}), flush=True)
    print(json.dumps({"rss": peak_memory()}), flush=True)
    return 0


def peak_memory() -> float:
    """Peak memory of this process in MiB.

    Linux includes in `ru_maxrss` the peak of the parent process at the time of the fork.
    """
    try:
        with open("/proc/self/status", encoding="utf-8") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        unit = 1024 if sys.platform == "linux" else 1024 * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


class LlamaPeer:
    """llama.cpp, used like its own batched benchmark."""

    def __init__(self, model: str, threads: int) -> None:
        self.llama = Llama(model, 16 * 1024, 64, threads)
        self.sample = self.llama.sampler()

    def run(self, prompt: int, rows: int, steps: int = 0, *, drawn: bool = False) -> float:
        """Seconds to compute prompts and then so many tokens of each, greedy or sampled."""
        return sum(self._both(prompt, rows, steps, drawn))

    def timed(self, prompt: int, rows: int, steps: int, *, drawn: bool = False) -> float:
        """Seconds of the decoding alone, or of the prefill if there are no steps."""
        prefill, decode = self._both(prompt, rows, steps, drawn)
        return decode if steps else prefill

    def _both(self, prompt: int, rows: int, steps: int, drawn: bool) -> tuple[float, float]:
        llama, choose = self.llama, self.sample if drawn else self.llama.greedy
        llama.forget()
        begun = time.perf_counter()
        last = []
        for row in range(rows):
            for first in range(0, prompt, BATCH):
                part = range(first, min(first + BATCH, prompt))
                llama.decode([(100 + (row * 7 + i * 3) % 1000, i, row, i == prompt - 1)
                              for i in part])  # fmt: skip
            last.append(choose((prompt - 1) % BATCH))
        middle = time.perf_counter()
        for step in range(steps):
            llama.decode([(token, prompt + step, row, True) for row, token in enumerate(last)])
            last = [choose(row) for row in range(rows)]
        return middle - begun, time.perf_counter() - middle


def main() -> int:
    """Measure `MODEL THREADS`, or run a JSON request: quantize, tokenize, score."""
    try:
        import llama_cpp
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    try:
        if len(sys.argv) > 1:
            return answer_tasks(lambda: LlamaPeer(sys.argv[1], int(sys.argv[2])))
        request = json.loads(sys.stdin.read())
        if "quantize" in request:
            silence(llama_cpp)
            quantize(llama_cpp, *request["quantize"])
        elif "tokenize" in request:
            _tokenize(request["tokenize"])
        else:
            _score(request["score"])
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
