"""Whole-program GPU benchmark: `python -m tools.bench_programs [--formats q4 Q4_K ...]`.

A model of a well-known shape with random weights: prompts, and decoding of one and more sequences,
greedy or with temperature and top_p. Each time is also given as a share of the measured memory
bandwidth and tensor-core throughput, and with `--kernels` kernel by kernel.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import re
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.cli.run_command import JSON, command, write_json
from jinfer.cli.terminal.argument_parser import argument
from jinfer.engine.runner.compiled_programs import CompiledPrograms
from jinfer.engine.runner.device_state import State
from jinfer.engine.runner.sampler_output import MAX_STEPS
from jinfer.engine.runner.step_key import Sizes, StepKey
from jinfer.loader.weights.gguf_blocks import REPACKED_FORMATS
from jinfer.loader.weights.storage_plan import columns_here
from jinfer.modelspec.resolve_spec import CheckpointFacts, resolve
from jinfer.modelspec.spec_files import families
from jinfer.modelspec.spec_values import MissingKey
from jinfer.nn.abstract_model import AbstractModel, build_abstract_model
from jinfer.quant import parse_format
from jinfer.quant.quantized_tensor import abstract
from jinfer.sampling.sampler_chain import sampler_sets
from jinfer.sampling.sampling_metadata import metadata_row
from jinfer.sampling.sampling_params import SamplingParams

from .bench_kernels import check_gpu, copy_rate, matmul_rate

# Seconds in all and how often, by kernel.
type Kernels = Mapping[str, tuple[float, float]]

_SHOWN = 16


def kernels_of(call: Callable[[], object], steps: int = 1) -> Kernels:
    """Kernels and copies of a call, divided by its number of steps.

    Args:
        call: waits until the device is done.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        (file,) = Path(folder).rglob("*.xplane.pb")
        found = jax.profiler.ProfileData.from_file(str(file))
        times: dict[str, tuple[float, float]] = {}
        for plane in found.planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    name = re.sub(r"(_\d+|__\d+|\.\d+)+$", "", event.name)
                    seconds, count = times.get(name, (0.0, 0.0))
                    times[name] = seconds + event.duration_ns * 1e-9 / steps, count + 1 / steps
    return times


def lines(kernels: Kernels) -> Iterator[str]:
    """The slowest kernels and their sum, as text."""
    ordered = sorted(kernels.items(), key=lambda item: -item[1][0])
    for name, (seconds, count) in ordered[:_SHOWN]:
        call = seconds / count * 1e6
        yield f"    {seconds * 1e6:9.1f} us {count:7.1f} x {call:8.2f} us  {name[:90]}"
    if ordered:
        total = sum(seconds for seconds, _ in kernels.values())
        number = sum(count for _, count in kernels.values())
        yield f"    {total * 1e6:9.1f} us {number:7.1f} kernels in all"


LLAMA_3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
YI_34B = {
    "vocab_size": 64000,
    "hidden_size": 7168,
    "num_attention_heads": 56,
    "num_key_value_heads": 8,
    "num_hidden_layers": 60,
    "intermediate_size": 20480,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000000.0,
}
FALCON_40B = {
    "vocab_size": 65024,
    "hidden_size": 8192,
    "num_attention_heads": 128,
    "num_kv_heads": 8,
    "num_hidden_layers": 60,
    "layer_norm_epsilon": 1e-5,
    "new_decoder_architecture": True,
}
SHAPES: dict[str, tuple[str, Mapping[str, Any]]] = {  # family, and its config.json
    "llama3_8b": ("llama", LLAMA_3_8B),
    "yi_34b": ("llama", YI_34B),
    "falcon_40b": ("falcon", FALCON_40B),
}
FORMATS = ("q4", "q3.5", "q8", "Q4_K", "bf16")
TASKS = ("decode-1", "decode-16", "sampled-1", "prompt-512")
DRAWN = SamplingParams(temperature=0.7, top_p=0.9, seed=0)
GREEDY = SamplingParams(temperature=0.0)
SLOTS = 16
CONTEXT = 8192
SLOT_BLOCKS = 128  # of the cache, a slot
LENGTH = 1024  # tokens of sequences that decode
_REPEATS = 5


def llama(format: str, sizes: Mapping[str, Any] = LLAMA_3_8B) -> AbstractModel:
    """An abstract Llama-like model for a GPU."""
    return abstract_model("llama", sizes, format)


def abstract_model(family: str, sizes: Mapping[str, Any], format: str) -> AbstractModel:
    """An abstract model of a family with these sizes, its matrices in a format."""

    def lookup(key: str) -> Any:
        if key not in sizes:
            raise MissingKey(key)
        return sizes[key]

    path = families()[family]
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    model = build_abstract_model(
        resolve([table], str(path), CheckpointFacts(lookup=lookup), {}), jnp.bfloat16
    )
    if format == "bf16":
        return model
    kept = REPACKED_FORMATS[format] if format in REPACKED_FORMATS else parse_format(format)
    parameters = tuple(
        parameter if role == "plain" else abstract(parameter.shape, kept, columns_here(kept))
        for parameter, role in zip(model.parameters, model.roles, strict=True)
    )
    return replace(model, parameters=parameters)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random(shape: tuple[int, ...], dtype: Any, key: Array) -> Array:
    """Random codes of any kind, and block numbers that keep activations in range."""
    if dtype == jnp.uint32:
        return jax.random.bits(key, shape, dtype)
    if dtype == jnp.int8:
        return jnp.full(shape, 20, dtype)
    if dtype == jnp.float16:
        return jnp.full(shape, 1e-3, dtype)
    return (jax.random.normal(key, shape, jnp.bfloat16) * 0.02).astype(dtype)


def random_leaves(programs: CompiledPrograms) -> tuple[Array, ...]:
    """Random weights as operands of the programs."""
    keys = jax.random.split(jax.random.key(0), len(programs.leaves))
    return tuple(
        _random(leaf.shape, leaf.dtype, key)
        for leaf, key in zip(programs.leaves, keys, strict=True)
    )


def state_at(programs: CompiledPrograms, length: int, *, sampled: bool) -> State:
    """Device state in which all slots decode, at so many tokens, greedily or not."""
    state = programs.empty_state()
    rows = state.lengths.shape[0]
    row = metadata_row(DRAWN if sampled else GREEDY, [], programs.sizes.vocab)
    sampler = jax.tree.map(lambda item: jnp.repeat(jnp.asarray(item), rows, axis=0), row)

    def counts(value: int) -> Array:
        return jnp.full((rows,), value, jnp.int32)

    history = jax.random.randint(jax.random.key(4), state.history.shape, 0, programs.sizes.vocab)
    return state._replace(
        history=history.astype(jnp.int32),
        lengths=counts(length),
        prompts=counts(length),
        limits=counts(programs.sizes.context),
        sampler=sampler,
    )


def scattered(programs: CompiledPrograms) -> dict[str, Array]:
    """Block tables of all slots, with blocks anywhere in the pool."""
    slots = programs.sizes.slots
    order = jax.random.permutation(jax.random.key(3), slots * SLOT_BLOCKS).astype(jnp.int32)
    table = order.reshape(slots, SLOT_BLOCKS)
    table = jnp.pad(table, ((0, 0), (0, programs.sizes.table - SLOT_BLOCKS)))
    return {group: jnp.array(table) for group in programs.sizes.blocks}


def compile_task(programs: CompiledPrograms, task: str) -> Any:
    """The program of a task."""
    kind, count = task.split("-")
    if kind != "prompt":
        shape = StepKey("decode", int(count), stages=sampler_sets()[0])
    else:
        shape = StepKey("logits", int(count), 1)
    function, donated, arguments = programs.step_function(shape)
    return jax.jit(function, donate_argnums=donated).lower(*arguments).compile()


def time_task(
    programs: CompiledPrograms,
    compiled: Any,
    leaves: tuple[Array, ...],
    task: str,
    *,
    kernels: bool,
) -> tuple[float, Kernels]:
    """Seconds of a step or a prompt, and its profile."""
    kind, number = task.split("-")
    count, steps = int(number), 1 if kind == "prompt" else MAX_STEPS
    state = state_at(programs, LENGTH, sampled=kind == "sampled")
    cache = programs.allocate_kv_cache()
    every, tables = jnp.arange(count, dtype=jnp.int32), scattered(programs)
    if kind == "prompt":
        last = jnp.full((1,), count - 1, jnp.int32)
        given: tuple[Any, ...] = (jnp.zeros_like(every), every, tables, last)
    else:
        given = (every, tables, jnp.int32(steps), jnp.int32(0))

    def call() -> None:
        nonlocal cache, state
        if kind == "prompt":
            cache, out, _ = compiled(leaves, cache, state, *given)
        else:
            cache, state, out = compiled(leaves, cache, state, *given)
        jax.block_until_ready(out)

    call()
    times = []
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        call()
        times.append((time.perf_counter() - begun) / steps)
    return statistics.median(times), kernels_of(call, steps) if kernels else {}


def bytes_read(model: AbstractModel, task: str) -> int:
    """Bytes of weights, and of previous keys and values, read by a step or a prompt."""
    kind, count = task.split("-")
    weights = sum(
        leaf.size * leaf.dtype.itemsize
        for parameter, role in zip(model.parameters, model.roles, strict=True)
        if role != "table"
        for leaf in jax.tree.leaves(parameter)
    )
    cache = sum(2 * shape.elements() for shape in model.caches.values())
    return weights + (0 if kind == "prompt" else cache * LENGTH * int(count))


def operations(model: AbstractModel, task: str) -> int:
    """Multiplications and additions of the matmuls."""
    kind, count = task.split("-")
    total = 0
    for parameter, role in zip(model.parameters, model.roles, strict=True):
        if role in ("matrix", "head"):
            rows = 1 if role == "head" and kind == "prompt" else int(count)
            total += 2 * rows * math.prod(parameter.shape)
    return total


def measure(
    formats: Sequence[str],
    tasks: Sequence[str],
    *,
    kernels: bool,
    shape: str = "llama3_8b",
    slots: int = SLOTS,
) -> dict[str, Any]:
    """All results; times in seconds, rates in bytes or operations per second."""
    copied, multiplied = copy_rate(), matmul_rate()
    device = jax.devices()[0].device_kind
    print(f"{device}: copy {copied / 1e12:.2f} TB/s, bf16 {multiplied / 1e12:.0f} TFLOP/s")
    print("format  task            ms  tokens/s  of copy  of matmul")
    rows: list[dict[str, Any]] = []
    for format in formats:
        model = abstract_model(*SHAPES[shape], format)
        blocks = {"all": slots * SLOT_BLOCKS}
        sizes = Sizes(slots, CONTEXT, model.vocab, blocks, jnp.bfloat16)
        programs = CompiledPrograms(model, sizes)
        leaves = random_leaves(programs)
        with ThreadPoolExecutor() as pool:
            compiled_tasks = list(pool.map(functools.partial(compile_task, programs), tasks))
        for task, compiled in zip(tasks, compiled_tasks, strict=True):
            took, found = time_task(programs, compiled, leaves, task, kernels=kernels)
            tokens = int(task.split("-")[1]) / took
            memory = bytes_read(model, task) / took / copied
            work = operations(model, task) / took / multiplied
            print(
                f"{format:<7} {task:<11} {took * 1e3:8.3f} {tokens:9.0f} {memory:8.0%} {work:9.0%}",
                flush=True,
            )
            for line in lines(found):
                print(line, flush=True)
            row = {"format": format, "task": task, "seconds": took, "of_copy": memory}
            rows.append({**row, "of_matmul": work, "kernels": found})
        del leaves
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    figures = {"device": device, "shape": shape, "copy": copied, "matmul": multiplied}
    return {**figures, "peak_bytes": peak, "programs": rows}


def _format(word: str) -> str:
    if word != "bf16" and word not in REPACKED_FORMATS:
        try:
            parse_format(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return word


def _task(word: str) -> str:
    if (found := re.fullmatch(r"(decode|sampled|prompt)-([1-9]\d*)", word)) is None:
        raise argparse.ArgumentTypeError(f"{word!r} is none; give decode-N, sampled-N or prompt-N")
    if int(found[2]) > (limit := CONTEXT if found[1] == "prompt" else SLOTS):
        raise argparse.ArgumentTypeError(f"{word!r} is too many; give at most {found[1]}-{limit}")
    return word


@command(
    "Times the programs of a model of a well-known shape on a GPU.",
    JSON,
    argument("--shape", choices=SHAPES, default="llama3_8b"),
    argument("--slots", type=int, choices=range(1, SLOTS + 1), default=SLOTS),
    argument(
        "--formats",
        nargs="+",
        type=_format,
        default=list(FORMATS),
        help="formats of the weights: q3.5_b64, Q4_K, bf16, ...",
    ),
    argument(
        "--tasks",
        nargs="+",
        type=_task,
        default=list(TASKS),
        help="programs: decode-N, sampled-N and prompt-N",
    ),
    argument("--kernels", action="store_true", help="also time each kernel"),
)
def main(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if options.kernels:  # in command buffers the profiler may see no kernels
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_command_buffer="
    check_gpu()
    result = measure(
        options.formats,
        options.tasks,
        kernels=options.kernels,
        shape=options.shape,
        slots=options.slots,
    )
    write_json(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
