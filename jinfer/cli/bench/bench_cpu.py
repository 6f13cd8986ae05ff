"""CPU benchmark, alone or against peers: `jinfer bench cpu MODEL.gguf...`.

Peers are llama.cpp, if a Python has it (`--peer-python`), and another checkout of jinfer
(`--beside`). All load the same file, or llama.cpp its own quantization of it (`--peer-type Q4_K_M`,
with `--set quantization.weights=q4`: the cost of equal quality), each in a process of its own
that waits while another works. They take turns, and a ratio is the median of the ratios of the
rounds, because the machine's speed changes from minute to minute but hardly within a round. All use
the cores of this process's affinity, so `taskset -c 0` measures one core.

A decoding step reads all weights once. Its share of the bandwidth compares that with the memory's
read rate at that time: it cannot exceed one, unless caches hold the weights. The memory is measured
before and after each round too, as other machines on the same processor share it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from jinfer import progress
from jinfer.api.llm import LLM
from jinfer.cli.bench.bench_figures import spread, spread_text, table
from jinfer.cli.bench.llama_peer import DRAWN, answer_tasks, ask, ending_hint
from jinfer.cli.bench.llama_peer import command as peer_command
from jinfer.cli.bench.machine_info import counters, machine, others, read_rate
from jinfer.cli.perplexity import parse_flat
from jinfer.cli.run_command import JSON, SET, command, write_json
from jinfer.cli.terminal.argument_parser import argument, several
from jinfer.cpu.cores import usable_cores
from jinfer.loader.checkpoint import open_checkpoint
from jinfer.loader.open_model import open_files
from jinfer.sampling.sampling_params import SamplingParams

OWN, PEER = "jinfer", "llama.cpp"
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class BenchTask:
    """What is measured: decoding, greedy or sampled, prefill, or decoding after it ("deep")."""

    kind: str
    size: int

    @property
    def name(self) -> str:
        """Its name in the table."""
        return f"{self.kind} {self.size}"


@dataclass(frozen=True)
class EngineUnderTest:
    """An engine under test.

    Attributes:
        name: as in the table.
        command: starts it, without the model and what follows.
        options: follow the model.
        folder: a checkout to run from.
        model: what it loads, if not the common one.
    """

    name: str
    command: tuple[str, ...]
    options: tuple[str, ...] = ()
    folder: Path | None = None
    model: str | None = None


class EngineProcess:
    """An engine in its own process, which measures one task at a time."""

    def __init__(self, side: EngineUnderTest, model: str) -> None:
        # Only jinfer's own processes need to find its folder; all have bytecode.
        root = side.folder or (_ROOT if side.name == OWN else None)
        found = {"PYTHONDONTWRITEBYTECODE": ""} | ({"PYTHONPATH": str(root)} if root else {})
        self.side, begun = side, time.perf_counter()
        self.process = subprocess.Popen(
            [*side.command, side.model or model, *side.options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **found},
            cwd=side.folder,
        )
        # From outside: a process knows its own begin by processor time, which NumPy's threads spin.
        try:
            self.started = {**self._answer(), "seconds": time.perf_counter() - begun}
        except BaseException:
            self.stop()
            raise

    def measure(self, task: BenchTask) -> float:
        """Tokens per second."""
        assert self.process.stdin is not None, "the process reads its tasks"
        with contextlib.suppress(BrokenPipeError):  # one that has ended gives no answer
            os.write(self.process.stdin.fileno(), f"{task.kind} {task.size}\n".encode())
        return float(self._answer("rate")["rate"])

    def close(self) -> dict[str, Any]:
        """End the process; return its memory report."""
        assert self.process.stdin is not None, "the process reads its tasks"
        self.process.stdin.close()
        memory = self._answer("rss")
        self.process.wait()
        return memory

    def stop(self) -> None:
        """Kill the process, if it still runs."""
        self.process.kill()
        with self.process:  # closes its pipes, and waits
            pass

    def _answer(self, key: str | None = None) -> dict[str, Any]:
        """The next line in JSON, which has a positive number by this name."""
        assert self.process.stdout is not None, "the process writes its answers"
        for line in self.process.stdout:
            if line.startswith("{"):
                return self._understood(line, key)
        with self.process:
            status = self.process.wait()
        hint = ending_hint(status) if self.side.name.startswith(PEER) else ""
        raise OSError(f"{self.side.name} ended without an answer (status {status}){hint}")

    def _understood(self, line: str, key: str | None) -> dict[str, Any]:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = dict(json.loads(line))
            known = isinstance(found.get("kinds", []), list)
            if known if key is None else 0 < found[key] < math.inf:
                return found
        when = "at its start" if key is None else f"where {key} is expected"
        raise OSError(
            f"{self.side.name} answers in another way than this version, {line.strip()!r:.100} "
            f"{when}: compare with a checkout whose `bench cpu` answers alike"
        )


class TimedEngine:
    """The engine of this checkout."""

    def __init__(self, source: str, keys: Mapping[str, Any]) -> None:
        self.llm = LLM(source, **keys)
        self.fresh, self.words = 0, min(1000, self.llm.spec.dims["vocab"] - 100)

    def run(self, prompt: int, rows: int, steps: int = 0, *, drawn: bool = False) -> float:
        """Seconds to compute prompts and then so many tokens of each, greedy or sampled."""
        # New tokens every time: nothing of a prompt is in the cache yet.
        self.fresh += 1
        return self._again(prompt, rows, steps, drawn)

    def _again(self, prompt: int, rows: int, steps: int, drawn: bool) -> float:
        """The same prompts as last time, if their number and length are the same."""
        prompts = [
            [(self.fresh * 31 + row * 7 + i * 3) % self.words + 100 for i in range(prompt)]
            for row in range(rows)
        ]
        how: Mapping[str, Any] = DRAWN if drawn else {"temperature": 0.0}
        params = SamplingParams(max_tokens=steps + 1, ignore_eos=True, **how)
        begun = time.perf_counter()
        self.llm.generate(prompts, params)
        return time.perf_counter() - begun

    def timed(self, prompt: int, rows: int, steps: int, *, drawn: bool = False) -> float:
        """Seconds of the decoding alone, or of the prefill if there are no steps."""
        computed = self.run(prompt, rows, drawn=drawn)
        if not steps:
            return computed
        # The prefix cache has the prompts now: a long one's time would hide that of its decoding.
        whole = self._again(prompt, rows, steps, drawn)
        decoding = whole - self._again(prompt, rows, 0, drawn)
        # A tiny model's tokens take less time than two runs differ by.
        return decoding if decoding > 0 else whole


TASKS = tuple(
    BenchTask(kind, n)
    for kind, sizes in (("decode", (1, 4, 8, 16)), ("sample", (1, 8)), ("prefill", (64, 512)))
    for n in sizes
)
# Measured only if named: they need more memory, or minutes.
LARGE_TASKS = tuple(
    BenchTask(kind, n)
    for kind, sizes in (("decode", (32, 64)), ("prefill", (2000, 7900)), ("deep", (7900,)))
    for n in sizes
)


def compare(
    model: str, sides: Sequence[EngineUnderTest], rounds: int, tasks: Sequence[BenchTask]
) -> dict[str, Any]:
    """Measure all engines on a model, in turns; ratios are relative to the first.

    Older checkouts that cannot sample would measure greedy decoding instead: tasks that an engine
    does not announce are left out.
    """
    workers: list[EngineProcess] = []
    try:
        for side in sides:
            workers.append(EngineProcess(side, model))
        known = [worker.started.get("kinds", ("decode", "prefill")) for worker in workers]
        unknown = [task for task in tasks if any(task.kind not in kinds for kinds in known)]
        tasks = [task for task in tasks if task not in unknown]
        rates: dict[str, dict[str, list[float]]] = {
            task.name: {side.name: [] for side in sides} for task in tasks
        }
        bandwidth: dict[str, list[float]] = {task.name: [] for task in tasks}
        for task in progress.track(tasks, Path(model).name, unit="task"):
            for worker in workers:  # once unmeasured: programs compile, caches warm
                worker.measure(task)
            decodes = task.kind != "prefill"
            readings = [read_rate(usable_cores())] if decodes else []
            for _ in range(rounds):
                for worker in workers:
                    rates[task.name][worker.side.name].append(worker.measure(task))
                if decodes:  # bandwidth before and after
                    readings.append(read_rate(usable_cores()))
                    bandwidth[task.name].append(statistics.mean(readings[-2:]))
        memory = {worker.side.name: worker.close() for worker in workers}
    finally:
        for worker in workers:
            worker.stop()
    return {
        "model": model,
        "started": {worker.side.name: worker.started for worker in workers},
        "memory": memory,
        "left_out": [task.name for task in unknown],
        "tasks": {
            name: {**summary(rate, sides[0].name), "bandwidth": bandwidth[name], "rounds": rate}
            for name, rate in rates.items()
        },
    }


def summary(rates: Mapping[str, Sequence[float]], own: str) -> dict[str, Any]:
    """Medians of each engine, and of the rounds' ratios of our own rate to each other's."""
    ratios = {
        name: [mine / theirs for mine, theirs in zip(rates[own], others, strict=True)]
        for name, others in rates.items()
        if name != own
    }
    return {
        "rates": {name: statistics.median(rate) for name, rate in rates.items()},
        "ratios": {name: spread(ratio) for name, ratio in ratios.items()},
    }


def step_bytes(model: str) -> int | None:
    """Bytes of weights read per step, without lookup-only tables; None if experts are chosen.

    As stored in the file, which both engines compute on directly.
    """
    tensors = dict(open_checkpoint(model).tensors)
    if any("_exps" in name for name in tensors):
        return None
    if "output.weight" in tensors:
        tensors.pop("token_embd.weight", None)
    return sum(tensor.nbytes for tensor in tensors.values())


def add_shares(result: dict[str, Any], read: int) -> None:
    """Add the share of the memory bandwidth to each decode result, the median of the rounds.

    Args:
        read: bytes of a step.
    """
    for name, row in result["tasks"].items():
        if row["bandwidth"] and not name.startswith("deep"):  # which reads the KV cache, too
            rows = int(name.split()[1])
            row["shares"] = {
                side: statistics.median(
                    read * rate / rows / bandwidth
                    for rate, bandwidth in zip(rates, row["bandwidth"], strict=True)
                )
                for side, rates in row["rounds"].items()
            }


def to_text(results: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown."""
    parts = []
    for result in results:
        own, *theirs = result["started"]
        heads = ["", f"{own} tokens/s (of the bandwidth)"]
        heads += [head for name in theirs for head in (f"{name} tokens/s", "ratio (least-most)")]
        rows = []
        for name, row in result["tasks"].items():
            others = ((_rate(row, side), spread_text(row["ratios"][side])) for side in theirs)
            rows.append([name, _rate(row, own), *chain.from_iterable(others)])
        for key, part, words in (
            ("seconds", "started", "start to first token, s"),
            ("rss", "memory", "peak memory, MiB"),
        ):
            mine = result[part][own][key]
            values = [result[part][side][key] for side in theirs]
            others = ((f"{value:.2f}", f"{mine / value:.2f}") for value in values)
            rows.append([words, f"{mine:.2f}", *chain.from_iterable(others)])
        parts += ["", Path(result["model"]).name, "", table(heads, rows)]
    return "\n".join(parts)


def _rate(row: Mapping[str, Any], side: str) -> str:
    share = f" ({row['shares'][side]:.0%})" if "shares" in row else ""
    return f"{row['rates'][side]:.1f}{share}"


def _words() -> list[str]:
    return [task.name.replace(" ", "") for task in (*TASKS, *LARGE_TASKS)]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


@command(
    "Measures jinfer on a CPU, optionally against llama.cpp or another jinfer.",
    argument(
        "models", nargs="+", metavar="MODEL", help="a .gguf, or a model whose weights are one"
    ),
    argument("--rounds", type=_positive, default=5, metavar="N", help="measurements of a task (5)"),
    several("--only", metavar="TASK", choices=_words(), help=f"only this: {', '.join(_words())}"),
    argument("--peer-python", metavar="FILE", help="a Python with llama_cpp (this, if it has it)"),
    several("--peer-type", metavar="TYPE", help="quantize with llama.cpp to this type, too"),
    argument(
        "--beside", type=Path, metavar="CHECKOUT", help="also measure the jinfer of this folder"
    ),
    SET,
    JSON,
    argument("--worker", metavar="ENGINE", choices=[OWN], help=argparse.SUPPRESS),
)
def main(options: argparse.Namespace) -> int:
    """Measure and print; or, as a worker, answer tasks."""
    if options.worker:
        return _work(options)
    models = [_file(model) for model in options.models]
    chosen = options.only or [task.name.replace(" ", "") for task in TASKS]
    tasks = [t for t in (*TASKS, *LARGE_TASKS) if t.name.replace(" ", "") in chosen]
    before, found = counters(), []
    changed = any(text.startswith(("quantization", "dtype")) for text in options.set)
    stored = not (changed or options.peer_type)
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            sides = _sides(options, tasks, model, Path(folder))
            result = compare(model, sides, options.rounds, tasks)
        if stored and (read := step_bytes(model)) is not None:
            add_shares(result, read)
        found.append(result)
    bandwidth = [
        rate for item in found for row in item["tasks"].values() for rate in row["bandwidth"]
    ] or [read_rate(usable_cores())]
    load = others(before, counters())
    print(json.dumps(machine()))
    lowest, highest = min(bandwidth) / 1e9, max(bandwidth) / 1e9
    print(f"the memory gives {lowest:.1f} to {highest:.1f} GB/s to {usable_cores()} cores")
    print("load by other processes: unknown" if load is None else str(load))
    if len(found[0]["started"]) == 1:
        print("no comparison: no Python with llama_cpp (--peer-python) and no --beside")
    if left_out := found[0]["left_out"]:
        print(f"left out, because not every engine knows it: {', '.join(left_out)}")
    print(to_text(found))
    others_load = None if load is None else {"cores": load.cores, "stolen": load.stolen}
    report = {"machine": machine(), "others": others_load, "results": found}
    write_json(options.json, report)
    return 0


def _file(source: str) -> str:
    """The GGUF file of a model, as an absolute path, for engines in other folders."""
    path = open_files(source, {}).weights
    if open_checkpoint(path).format != "gguf":
        raise OSError(f"{path}: is no GGUF file")
    return str(path.resolve())


def _room(tasks: Sequence[BenchTask]) -> list[str]:
    """The engine's keys, where tasks need more sequences or positions than usual."""
    rows = max([16, *(task.size for task in tasks if task.kind in ("decode", "sample"))])
    tokens = max([0, *(task.size for task in tasks if task.kind in ("prefill", "deep"))])
    context = [] if tokens < 900 else ["engine.context=8192"]
    return context if rows == 16 else [*context, f"engine.slots={rows}"]


def _sides(
    options: argparse.Namespace, tasks: Sequence[BenchTask], model: str, folder: Path
) -> list[EngineUnderTest]:
    """The engines under test, our own first.

    Args:
        folder: for llama.cpp's quantized copies of the model.
    """
    keys = [*_room(tasks), *options.set]
    python, passed = sys.executable, tuple(word for text in keys for word in ("--set", text))
    own = (python, "-P", "-m", "jinfer", "bench", "cpu", "--worker", OWN)
    sides = [EngineUnderTest(OWN, own, passed)]
    peer = options.peer_python or (python if find_spec("llama_cpp") else None)
    if options.peer_type and not peer:
        raise OSError("--peer-type: no Python with llama_cpp makes it; name one by --peer-python")
    if peer:
        theirs = EngineUnderTest(PEER, tuple(peer_command(peer)), (str(usable_cores()),))
        for kind in options.peer_type:
            made = str(folder / f"{kind}.gguf")
            ask(peer, {"quantize": [model, made, kind]})
            sides.append(replace(theirs, name=f"{PEER} {kind}", model=made))
        if not options.peer_type:
            sides.append(theirs)
    if options.beside:
        other = options.beside.resolve()
        if not (other / "jinfer" / "__main__.py").is_file():
            raise OSError(f"--beside {options.beside}: is no checkout of jinfer")
        there = (python, "-m", "jinfer", "bench", "cpu", "--worker", OWN)
        sides.append(EngineUnderTest(f"{OWN} in {other.name}", there, passed, other))
    return sides


def _work(options: argparse.Namespace) -> int:
    overrides: dict[str, Any] = {"engine.slots": 16, "engine.context": 1024}
    for text in options.set:
        overrides |= parse_flat(text)
    return answer_tasks(lambda: TimedEngine(options.models[0], overrides))
