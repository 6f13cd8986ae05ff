"""Speed on a CPU beside llama.cpp: `python -m tools.bench_cpu MODEL.gguf... [--json FILE]`.

Both engines load the same file, each in a process of its own that waits while the other works;
they take turns, and a ratio is the median of the ratios of the rounds, because the machine's speed
changes from minute to minute but hardly within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROMPT = 16  # tokens before decoding begins
_STEPS = 48  # tokens decoded in a measurement


@dataclass(frozen=True)
class Task:
    """What is measured: decoding of several sequences, or the prefill of one."""

    kind: str
    size: int

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.kind} {self.size}"


TASKS = (*(Task("decode", n) for n in (1, 4, 8, 16)), *(Task("prefill", n) for n in (64, 512)))


class Worker:
    """An engine in a process of its own, that measures one task at a time."""

    def __init__(self, engine: str, model: str, python: str, options: Sequence[str]) -> None:
        command = [python, "-m", "tools.bench_cpu", "--worker", engine, model, *options]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        self.engine = engine
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.started = self._answer()

    def measure(self, task: Task) -> float:
        """Tokens per second."""
        assert self.process.stdin is not None, "the process reads its tasks"
        self.process.stdin.write(f"{task.kind} {task.size}\n")
        self.process.stdin.flush()
        return float(self._answer()["rate"])

    def close(self) -> dict[str, Any]:
        """Ends the process; what it says of its memory."""
        assert self.process.stdin is not None, "the process reads its tasks"
        with self.process:
            self.process.stdin.close()
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None, "the process writes its answers"
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        with self.process:
            status = self.process.wait()
        hint = "; --peer-python has to name a Python with llama-cpp-python"
        hint = hint if self.engine == "llama.cpp" else ""
        raise OSError(f"{self.engine} ended without an answer (status {status}){hint}")


def compare(
    model: str, rounds: int, peer_python: str, options: Sequence[str], tasks: Sequence[Task]
) -> dict[str, Any]:
    """Measures both engines on a model, taking turns."""
    from tqdm import tqdm  # the peer's Python need not have it

    workers = [
        Worker("llama.cpp", model, peer_python, ()),
        Worker("jinfer", model, sys.executable, options),
    ]
    rates: dict[str, dict[str, list[float]]] = {t.name: {w.engine: [] for w in workers}
                                                for t in tasks}  # fmt: skip
    for task in tqdm(tasks, desc=Path(model).name, unit="task", leave=False):
        for worker in workers:  # once unmeasured: programs compile, caches warm
            worker.measure(task)
        for _ in range(rounds):
            for worker in workers:
                rates[task.name][worker.engine].append(worker.measure(task))
    memory = {worker.engine: worker.close() for worker in workers}
    return {
        "model": model,
        "started": {worker.engine: worker.started for worker in workers},
        "memory": memory,
        "tasks": {name: _summary(both) for name, both in rates.items()},
    }


def _summary(both: dict[str, list[float]]) -> dict[str, float]:
    peer, own = both["llama.cpp"], both["jinfer"]
    ratios = [mine / theirs for mine, theirs in zip(own, peer, strict=True)]
    return {
        "llama.cpp": statistics.median(peer),
        "jinfer": statistics.median(own),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    names = {key.strip(): value.strip() for key, value in values.items()}
    wide = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")
            if flag in names.get("flags", "").split()]  # fmt: skip
    return {
        "cpu": names.get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "features": wide,
        "python": platform.python_version(),
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = []
    for result in results:
        lines += [
            f"\n{Path(result['model']).name}\n",
            "| | llama.cpp tokens/s | jinfer tokens/s | ratio (least-most) |",
            "|---|---|---|---|",
        ]
        for name, row in result["tasks"].items():
            spread = f"{row['ratio']:.2f} ({row['least']:.2f}-{row['most']:.2f})"
            lines.append(f"| {name} | {row['llama.cpp']:.1f} | {row['jinfer']:.1f} | {spread} |")
        for key, words in (("seconds", "start to first token, s"), ("rss", "peak memory, MiB")):
            part = result["started"] if key == "seconds" else result["memory"]
            peer, own = part["llama.cpp"][key], part["jinfer"][key]
            lines.append(f"| {words} | {peer:.2f} | {own:.2f} | {own / peer:.2f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status. Errors are one line, never a traceback."""
    options = _parser().parse_args(arguments)
    if options.worker:
        return _work(options)
    tasks = [t for t in TASKS if not options.only or t.name.replace(" ", "") in options.only]
    try:
        for model in options.models:
            if not Path(model).is_file():
                raise OSError(f"{model}: there is no such file")
        results = [
            compare(model, options.rounds, options.peer_python, _passed(options), tasks)
            for model in options.models
        ]
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(machine()))
    print(table(results))
    if options.json:
        report = {"machine": machine(), "results": results}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _passed(options: argparse.Namespace) -> list[str]:
    return [word for text in options.set for word in ("--set", text)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench_cpu", description="Measures jinfer beside llama.cpp."
    )
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL.gguf", help="files that both engines load")
    add("--rounds", type=int, default=5, help="measurements of each task (5)")
    add("--only", action="append", default=[], metavar="TASK", help="such as decode1, prefill512")
    add("--peer-python", default=sys.executable, metavar="FILE", help="one that has llama_cpp")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="set any key of the spec")
    add("--json", metavar="FILE", help="write the results as JSON too")
    add("--worker", metavar="ENGINE", help=argparse.SUPPRESS)
    return parser


def _work(options: argparse.Namespace) -> int:
    """Measures what standard input asks for, a task a line. Errors are one line."""
    try:
        return _serve(options)
    except (ImportError, OSError, ValueError) as error:
        print(f"error: {options.worker}: {error}", file=sys.stderr)
        return 2


def _serve(options: argparse.Namespace) -> int:
    begun = time.time() - time.process_time()
    engine: Any = _Llama(options.models[0]) if options.worker == "llama.cpp" else _Jinfer(options)
    engine.run(1, 1)
    print(json.dumps({"seconds": time.time() - begun}), flush=True)
    for line in sys.stdin:
        kind, size = line.split()
        prompt, rows = (int(size), 1) if kind == "prefill" else (_PROMPT, int(size))
        steps = 0 if kind == "prefill" else _STEPS
        seconds = engine.timed(prompt, rows, steps)
        print(json.dumps({"rate": (rows * steps if steps else prompt) / seconds}), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"rss": peak}), flush=True)
    return 0


class _Jinfer:
    """This engine, greedy."""

    def __init__(self, options: argparse.Namespace) -> None:
        from jinfer import LLM
        from tools.perplexity import parse_flat

        overrides: dict[str, Any] = {"engine.slots": 16, "engine.context": 1024}
        for text in options.set:
            overrides |= parse_flat(text)
        self.llm = LLM(options.models[0], **overrides)
        self.fresh = 0

    def run(self, prompt: int, rows: int, steps: int = 0) -> float:
        """Seconds to compute prompts and then so many tokens of each."""
        from jinfer import SamplingParams

        # New tokens every time: nothing of a prompt is in the cache yet.
        self.fresh += 1
        prompts = [[(self.fresh * 31 + row * 7 + i * 3) % 1000 + 100 for i in range(prompt)]
                   for row in range(rows)]  # fmt: skip
        begun = time.perf_counter()
        self.llm.generate(prompts, SamplingParams(max_tokens=steps + 1, ignore_eos=True))
        return time.perf_counter() - begun

    def timed(self, prompt: int, rows: int, steps: int) -> float:
        """Seconds of the decoding alone, or of the prefill where there are no steps."""
        whole = self.run(prompt, rows, steps)
        return whole - self.run(prompt, rows) if steps else whole


class _Llama:
    """llama.cpp, greedy, as its own batched benchmark does it."""

    def __init__(self, model: str) -> None:
        from tools.llama_peer import Llama

        self.llama = Llama(model, 16 * 1024, 16)

    def run(self, prompt: int, rows: int, steps: int = 0) -> float:
        """Seconds to compute prompts and then so many tokens of each."""
        return sum(self._both(prompt, rows, steps))

    def timed(self, prompt: int, rows: int, steps: int) -> float:
        """Seconds of the decoding alone, or of the prefill where there are no steps."""
        prefill, decode = self._both(prompt, rows, steps)
        return decode if steps else prefill

    def _both(self, prompt: int, rows: int, steps: int) -> tuple[float, float]:
        llama = self.llama
        llama.forget()
        begun = time.perf_counter()
        last = []
        for row in range(rows):
            llama.decode([(100 + (row * 7 + i * 3) % 1000, i, row, i == prompt - 1)
                          for i in range(prompt)])  # fmt: skip
            last.append(int(llama.logits(prompt - 1).argmax()))
        middle = time.perf_counter()
        for step in range(steps):
            llama.decode([(token, prompt + step, row, True) for row, token in enumerate(last)])
            last = [int(llama.logits(row).argmax()) for row in range(rows)]
        return middle - begun, time.perf_counter() - middle


if __name__ == "__main__":
    sys.exit(main())
