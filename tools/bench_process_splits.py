"""Splits over processes that are devices of their own: each has its share of the cores.

One process with all cores, and jobs of several with equal shares of them, by layers and by tensors,
load the same model and take turns. What the cost model predicts of the jobs, from figures measured
in the same processes before, stands beside what is measured. The time of a step that neither
reading nor multiplying explains is taken from the single process, whose prediction is therefore
what it measured.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import jinfer
from jinfer.nn.abstract_model import build
from jinfer.opening.open_model import open_model
from jinfer.parallel.cost_model import Estimate, Link, Machine, Work, estimate
from jinfer.parallel.layer_bytes import weigh
from jinfer.parallel.placement import plan_of, work_of
from jinfer.weights.plan_weights import find_weights

from .llama_peer import PROMPT, STEPS
from .machine_info import counters, machine, others

_ROOT = Path(jinfer.__path__[0]).parent
# Threads are made for the cores that a process has when it begins, so it is bound before that.
_BOUND = (
    "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(','))); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)
_NO_LINK = Link(float("inf"), 0.0)


@dataclass
class Side:
    """Processes that compute a model together.

    Attributes:
        devices: as `partition.devices`; "" for one process without.
        pipe, tensor: the layout.
        figures: what its first process found of its cores and links.
        rates: tokens a second of each round, by how many sequences there were.
    """

    devices: str
    pipe: int
    tensor: int
    processes: list[subprocess.Popen[str]]
    figures: dict[str, Any] = field(default_factory=dict)
    rates: dict[int, list[float]] = field(default_factory=dict)

    def answer(self) -> dict[str, Any]:
        """What the first process says next. Raises `OSError` where it has ended."""
        out = self.processes[0].stdout
        assert out is not None, "it is read from"
        for line in out:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise OSError(f'the processes of "{self.devices}" ended without an answer')

    def measure(self, rows: int) -> float:
        """Tokens a second of so many sequences."""
        given = self.processes[0].stdin
        assert given is not None, "it is written to"
        given.write(f"decode {rows}\n")
        given.flush()
        return float(self.answer()["rate"])

    def stop(self) -> None:
        """Ends all processes, in whatever they do."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            with process:  # which closes what it is spoken to by, and waits
                pass


@dataclass(frozen=True)
class Compared:
    """A split beside one process.

    Attributes:
        rows: sequences at a time.
        rate, single: tokens a second of the split and of one process, the medians of the rounds.
        ratio, least, most: of the rounds' rates.
        predicted: tokens a second, by the cost model.
    """

    devices: str
    rows: int
    rate: float
    single: float
    ratio: float
    least: float
    most: float
    predicted: float

    @property
    def deviation(self) -> float:
        """How far off the prediction is."""
        return self.predicted / self.rate - 1


def compare(options: argparse.Namespace, keys: Mapping[str, Any], command: Sequence[str]) -> str:
    """Measures the splits; gives a report.

    Args:
        keys: that the model is opened with, by their dotted names.
        command: what starts a worker, see `split_worker`.

    Raises:
        OSError: a process has ended.
    """
    before, count = counters(), options.processes
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        raise OSError(f"--processes {count}: there are {len(cores)} cores, and each needs one")
    share = len(cores) // count
    groups = [cores[i * share : (i + 1) * share] for i in range(count)]
    numbers = [str(i) for i in range(count)]
    layouts = {"": (1, 1), ";".join(numbers): (count, 1), "&".join(numbers): (1, count)}
    sides = list[Side]()
    try:
        for devices, (pipe, tensor) in layouts.items():
            own = _started(devices, groups if devices else [cores], command)
            sides.append(Side(devices, pipe, tensor, own))
            sides[-1].figures = sides[-1].answer()
            sides[-1].answer()  # that the model is loaded
        for rows in dict.fromkeys((1, options.requests)):
            for side in sides:  # once unmeasured: programs compile, caches warm
                side.measure(rows)
                side.rates[rows] = []
            for _ in range(options.rounds):
                for side in sides:
                    side.rates[rows].append(side.measure(rows))
    finally:
        for side in sides:
            side.stop()
    found = _compared(sides, options.source, keys)
    beside = others(before, counters())
    if options.json:
        report = {
            "machine": machine(),
            "figures": {side.devices: side.figures for side in sides},
            "splits": [{**asdict(each), "deviation": each.deviation} for each in found],
        }
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    said = "what others did is not known here" if beside is None else str(beside)
    heads = [json.dumps(machine()), said, *_told(sides, len(cores), share)]
    return "\n".join([*heads, "", *table(found)])


def _started(
    devices: str, groups: Sequence[Sequence[int]], command: Sequence[str]
) -> list[subprocess.Popen[str]]:
    """A process for each group of cores, with one device."""
    port = _free_port()
    made = []
    for rank, cores in enumerate(groups):
        job = ["--coordinator", f"127.0.0.1:{port}", "--processes", str(len(groups))]
        job += ["--process", str(rank), "--devices", devices]
        bound = [sys.executable, "-c", _BOUND, ",".join(map(str, cores))]
        made.append(
            subprocess.Popen(
                [*bound, sys.executable, *command, *(job if devices else [])],
                stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
                env={**os.environ, "PYTHONPATH": str(_ROOT)},
            )
        )
    return made


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _compared(sides: Sequence[Side], source: str, keys: Mapping[str, Any]) -> list[Compared]:
    """The splits beside the single process, which is the first."""
    single, *splits = sides
    found = list[Compared]()
    for rows, rates in single.rates.items():
        for side in splits:
            ratios = [a / b for a, b in zip(side.rates[rows], rates, strict=True)]
            predicted = predict(single, side, rows, *_model(source, keys, side.devices))
            found.append(
                Compared(
                    side.devices,
                    rows,
                    statistics.median(side.rates[rows]),
                    statistics.median(rates),
                    statistics.median(ratios),
                    min(ratios),
                    max(ratios),
                    predicted,
                )
            )
    return found


def _model(source: str, keys: Mapping[str, Any], devices: str) -> tuple[Work, list[float]]:
    """What a model asks for, and which part of what is read each stage has."""
    opened = open_model(source, {**keys, "partition.devices": devices})
    spec, dtype = opened.spec, jnp.dtype(opened.dtype)
    model = find_weights(build(spec, dtype), spec, opened.checkpoint, opened.activations).model
    weight = weigh(spec, model)
    work = work_of(spec, model, weight, dtype, opened.kv_cache)
    plan = plan_of(spec, model, opened.context, dtype, opened.kv_cache, imagined=True)
    read = work.weights - work.tables
    shares = [(weight.of(row.slice) - row.slice.first * work.tables) / read for row in plan.stages]
    return work, shares


def predict(single: Side, side: Side, rows: int, work: Work, shares: Sequence[float]) -> float:
    """Tokens a second of so many sequences.

    Args:
        single: whose rates say what a step takes beside reading and multiplying.
        shares: which part of what is read each stage has.
    """
    own, found = single.figures, side.figures
    alone = Machine(0.0, own["read"], own["flops"], _NO_LINK, _NO_LINK, 0.0)
    lanes = min(side.pipe, rows)
    batch = -(-rows // lanes)
    apart = {
        count: max(0.0, count / statistics.median(rates) - _of(work, alone, 1, 1, count).step)
        for count, rates in single.rates.items()
    }
    few, many = min(apart), max(apart)
    part = (batch - few) / max(1, many - few)
    sums, passes = (Link(*found[name]) for name in ("sums", "passes"))
    machine = Machine(
        memory=0.0,
        read=found["read"],
        flops=found["flops"],
        sums=sums,
        passes=passes,
        # Of stages that follow each other the model counts a message for each; devices of one stage
        # are told as well where a step's tokens stand.
        call=passes.latency if side.pipe == 1 else 0.0,
        together=found["together"],
        apart=apart[few] + part * (apart[many] - apart[few]),
    )
    split = _of(work, machine, side.pipe, side.tensor, batch, shares)
    return batch / split.step if lanes == 1 else split.tokens


def _of(
    work: Work,
    machine: Machine,
    pipe: int,
    tensor: int,
    batch: int,
    shares: Sequence[float] = (),
) -> Estimate:
    context = PROMPT + STEPS // 2
    return estimate(work, machine, pipe, tensor, batch=batch, context=context, shares=shares)


def _told(sides: Sequence[Side], cores: int, share: int) -> list[str]:
    """What was measured before, for the cost model."""
    single, *splits = sides
    lines = [
        f"one process with {cores} cores reads {single.figures['read'] / 1e9:.1f} GB/s of weights; "
        f"with {share}, {splits[0].figures['read'] / 1e9:.1f} alone, and "
        f"{splits[0].figures['together'] / 1e9:.1f} are read by all together"
    ]
    for name, words in (("sums", "a sum after a product among"), ("passes", "a vector between")):
        rate, latency = splits[0].figures[name]
        times = 2 if name == "sums" else 1
        took = f"{words} processes takes {latency * times * 1e6:.0f} µs"
        found = rate < single.figures["read"]  # else size made no difference that could be measured
        lines.append(f"{took}, and {rate / 1e9:.2f} GB/s go" if found else f"{took} of any size")
    return lines


def table(every: Sequence[Compared]) -> list[str]:
    """The splits as Markdown."""
    heads = [
        "devices",
        "sequences",
        "one process, tokens/s",
        "split, tokens/s",
        "ratio (least-most)",
    ]
    rows = [[*heads, "predicted, tokens/s", "off by"], ["---"] * 7]
    rows += [
        [
            f'"{each.devices}"',
            str(each.rows),
            f"{each.single:.1f}",
            f"{each.rate:.1f}",
            f"{each.ratio:.2f} ({each.least:.2f}-{each.most:.2f})",
            f"{each.predicted:.1f}",
            f"{each.deviation:+.0%}",
        ]
        for each in every
    ]
    return ["| " + " | ".join(row) + " |" for row in rows]
