"""Multi-process split benchmark: processes as devices, each with its share of the cores.

One process with all cores, and jobs of several with equal shares of them, by pipeline and tensor
parallelism, load the same model and take turns. The cost model's prediction, from measurements in
the same processes, is shown beside the results. The part of a step that neither reading nor
multiplying explains is taken from the single process, whose prediction therefore equals its
measurement.
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
from jinfer.loader.open_model import open_model
from jinfer.loader.weights.plan_weights import plan_weights
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.parallel.cost_model import (
    CostEstimate,
    Hardware,
    Interconnect,
    ModelCost,
    estimate_decode,
)
from jinfer.parallel.placement import ModelToPlace, model_cost, partition_plan

from .llama_peer import PROMPT, STEPS
from .machine_info import counters, machine, others
from .run_main import write_json

_ROOT = Path(jinfer.__path__[0]).parent
# Threads are made for the cores that a process has when it begins, so it is bound before that.
_BOUND = (
    "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(','))); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)
_NO_LINK = Interconnect(float("inf"), 0.0)


@dataclass
class SplitJob:
    """A job of processes that compute a model together.

    Attributes:
        devices: as `partition.devices`; "" for a single process.
        pipe, tensor: pipeline and tensor parallel sizes.
        figures: cost model measurements of its first process.
        rates: tokens per second of each round, by number of sequences.
    """

    devices: str
    pipe: int
    tensor: int
    processes: list[subprocess.Popen[str]]
    figures: dict[str, Any] = field(default_factory=dict)
    rates: dict[int, list[float]] = field(default_factory=dict)

    def answer(self) -> dict[str, Any]:
        """The next message of the first process. Raises `OSError` if it has ended."""
        out = self.processes[0].stdout
        assert out is not None, "it is read from"
        for line in out:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise OSError(f'the processes of "{self.devices}" ended without an answer')

    def measure(self, rows: int) -> float:
        """Tokens per second of so many sequences."""
        given = self.processes[0].stdin
        assert given is not None, "it is written to"
        given.write(f"decode {rows}\n")
        given.flush()
        return float(self.answer()["rate"])

    def stop(self) -> None:
        """Kills all processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            with process:  # closes its pipes, and waits
                pass


@dataclass(frozen=True)
class SplitComparison:
    """A split beside a single process.

    Attributes:
        rows: number of sequences.
        rate, single: tokens per second of the split and of one process, medians of the rounds.
        ratio, least, most: of the rounds' rates.
        predicted: tokens per second, by the cost model.
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
        """Relative error of the prediction."""
        return self.predicted / self.rate - 1


def compare(options: argparse.Namespace, keys: Mapping[str, Any], command: Sequence[str]) -> str:
    """Measures the splits; returns a report.

    Args:
        keys: overrides the model is opened with, by dotted name.
        command: starts a worker, see `bench_split_worker`.

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
    sides = list[SplitJob]()
    try:
        for devices, (pipe, tensor) in layouts.items():
            own = _started(devices, groups if devices else [cores], command)
            sides.append(SplitJob(devices, pipe, tensor, own))
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
        write_json(options.json, report)
    said = "what others did is not known here" if beside is None else str(beside)
    heads = [json.dumps(machine()), said, *_measured_machine(sides, len(cores), share)]
    return "\n".join([*heads, "", *table(found)])


def _started(
    devices: str, groups: Sequence[Sequence[int]], command: Sequence[str]
) -> list[subprocess.Popen[str]]:
    """Starts a process for each group of cores, with one device."""
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


def _compared(
    sides: Sequence[SplitJob], source: str, keys: Mapping[str, Any]
) -> list[SplitComparison]:
    """The splits relative to the single process, which is the first."""
    single, *splits = sides
    found = list[SplitComparison]()
    for rows, rates in single.rates.items():
        for side in splits:
            ratios = [a / b for a, b in zip(side.rates[rows], rates, strict=True)]
            predicted = predict(single, side, rows, *_model(source, keys, side.devices))
            found.append(
                SplitComparison(
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


def _model(source: str, keys: Mapping[str, Any], devices: str) -> tuple[ModelCost, list[float]]:
    """The model's work for the cost model, and the share of the bytes each stage reads."""
    opened = open_model(source, {**keys, "partition.devices": devices})
    spec, dtype = opened.spec, jnp.dtype(opened.dtype)
    model = plan_weights(
        build_abstract_model(spec, dtype), spec, opened.checkpoint, opened.activations
    ).model
    whole = ModelToPlace(spec, model, opened.context, dtype, opened.kv_cache)
    weight, work, plan = whole.weights, model_cost(whole), partition_plan(whole, dry_run=True)
    read = work.weights - work.tables
    shares = [(weight.of(row.slice) - row.slice.first * work.tables) / read for row in plan.stages]
    return work, shares


def predict(
    single: SplitJob, side: SplitJob, rows: int, work: ModelCost, shares: Sequence[float]
) -> float:
    """Predicted tokens per second of so many sequences.

    Args:
        single: the single process, whose rates give the fixed cost of a step.
        shares: the share of the bytes each stage reads.
    """
    own, found = single.figures, side.figures
    alone = Hardware(0.0, own["read"], own["flops"], _NO_LINK, _NO_LINK, 0.0)
    lanes = min(side.pipe, rows)
    batch = -(-rows // lanes)
    apart = {
        count: max(0.0, count / statistics.median(rates) - _of(work, alone, 1, 1, count).step)
        for count, rates in single.rates.items()
    }
    few, many = min(apart), max(apart)
    part = (batch - few) / max(1, many - few)
    sums, passes = (Interconnect(*found[name]) for name in ("sums", "passes"))
    machine = Hardware(
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
    work: ModelCost,
    machine: Hardware,
    pipe: int,
    tensor: int,
    batch: int,
    shares: Sequence[float] = (),
) -> CostEstimate:
    context = PROMPT + STEPS // 2
    return estimate_decode(work, machine, pipe, tensor, batch=batch, context=context, shares=shares)


def _measured_machine(sides: Sequence[SplitJob], cores: int, share: int) -> list[str]:
    """The measurements, as machine parameters of the cost model."""
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
        found = rate < single.figures["read"]  # otherwise size made no measurable difference
        lines.append(f"{took}, and {rate / 1e9:.2f} GB/s go" if found else f"{took} of any size")
    return lines


def table(every: Sequence[SplitComparison]) -> list[str]:
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
