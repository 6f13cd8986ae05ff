"""Compiles jinfer's own programs for an H200 without one and counts the kernels of a layer.

`python -m tests.kernels_pallas.programs` prints a table of all of them, or of those that are named,
with `--kernels` the kernels of a layer too, with `--json` JSON: name -> `Counts`. JAX needs to
know the platform before it starts, so this is a program.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.kernels_pallas.sass import H200_PROPERTIES

FEW, MANY = 2, 4  # layers; what the second program has more of is two layers
SLOTS = 16
CONTEXT = 8192
BLOCKS = 2048  # of 64 tokens
NAMES = [
    f"{kind}-{format}"
    for format in ("q4", "q3.5", "q8", "Q4_K")
    for kind in ("decode-1", "decode-16", "prompt-512")
]


@dataclass(frozen=True)
class Counts:
    """What one layer adds to a program.

    Attributes:
        kernels: operations of the device, copies included.
        loops: loops of the program.
        alone: kernels outside of command buffers.
        temporary: bytes of memory for results in between, of the program with `FEW` layers.
        added: bytes of them that a layer adds.
        copied: bytes of the largest array that is copied.
        kept: whether all of the cache is changed where it is.
        named: kernels by the kind of their names.
    """

    kernels: int
    loops: int
    alone: int
    temporary: int
    added: int
    copied: int
    kept: bool
    named: dict[str, float]


@dataclass(frozen=True)
class Thunks:
    """What a compiled program does, as XLA writes it down.

    Attributes:
        kernels: names of kernels and copies, by how often they stand there.
        loops: while loops.
        alone: kernels and copies that are in no command buffer.
    """

    kernels: Counter[str]
    loops: int
    alone: int


_THUNK = re.compile(r"^( *)\d+: (k\w+) +\[[^\]]*\] *(\S*)")
_STRUCTURE = {"kWhile", "kConditional", "kSequential", "kCommandBuffer"}


def thunks(listing: str) -> Thunks:
    """Reads XLA's list of thunks."""
    kernels, loops, alone = Counter[str](), 0, 0
    buffer: int | None = None  # indentation of the command buffer that lines are in
    for line in listing.splitlines():
        found = _THUNK.match(line)
        if found is None:
            continue
        indent, kind, name = len(found[1]), found[2], found[3]
        if buffer is not None and indent <= buffer:
            buffer = None
        if kind == "kCommandBuffer":
            buffer = indent
        loops += kind == "kWhile"
        if kind not in _STRUCTURE:
            kernels[re.sub(r"(_\d+|__\d+)$", "", name)] += 1
            alone += buffer is None
    return Thunks(kernels, loops, alone)


def largest_copy(hlo: str) -> int:
    """Bytes of the largest array that a program of HLO copies."""
    sizes = [0]
    for kind, bits, dims in re.findall(r"= ([a-z]+)(\d+)\[([\d,]*)\]\S* copy(?:-start)?\(", hlo):
        del kind
        size = int(bits) // 8
        for dim in filter(None, dims.split(",")):
            size *= int(dim)
        sizes.append(size)
    return max(sizes)


def compiled(name: str, layers: int, folder: Path) -> tuple[Thunks, Any]:
    """One program, and what XLA says of it."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from jinfer.engine.runner.compiled_programs import CompiledPrograms
    from jinfer.engine.runner.step_key import Sizes, StepKey
    from jinfer.ops.backend import target_platform
    from tests.kernels_pallas.helpers import H200
    from tools.bench_programs import LLAMA_3_8B, llama

    for old in folder.iterdir():
        old.unlink()
    kind, tokens, format = name.split("-")
    described = topologies.get_topology_desc(
        platform="cuda", target_config=H200_PROPERTIES, topology="1x1x1"
    )
    sharding = SingleDeviceSharding(described.devices[0])
    if kind == "decode":
        shape = StepKey("decode", int(tokens), stages=("temperature",))
    else:
        shape = StepKey("logits", int(tokens), 1)
    with target_platform("gpu"), jax.sharding.use_abstract_mesh(H200):
        model = llama(format, {**LLAMA_3_8B, "num_hidden_layers": layers})
        sizes = Sizes(SLOTS, CONTEXT, model.vocab, {"all": BLOCKS}, jnp.bfloat16)
        function, donated, args = CompiledPrograms(model, sizes).step_function(shape)
        args = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args
        )
        program = jax.jit(function, donate_argnums=donated).trace(*args).lower().compile()
    (listing,) = folder.glob("*with_parts*thunk_sequence_after_thunk_passes.txt")
    return thunks(listing.read_text(encoding="utf-8")), program


def count(name: str, folder: Path) -> Counts:
    """Compiles a program with few layers and with more."""
    (few, small), (many, large) = (compiled(name, layers, folder) for layers in (FEW, MANY))
    layers = MANY - FEW
    memory, more = small.memory_analysis(), large.memory_analysis()
    pools = FEW * 2 * BLOCKS * 64 * 8 * 128 * 2  # 8 heads of keys, 128 numbers each
    named = {key: each / layers for key, each in (many.kernels - few.kernels).items()}
    return Counts(
        kernels=round((many.kernels.total() - few.kernels.total()) / layers),
        loops=round((many.loops - few.loops) / layers),
        alone=round((many.alone - few.alone) / layers),
        temporary=memory.temp_size_in_bytes,
        added=(more.temp_size_in_bytes - memory.temp_size_in_bytes) // layers,
        copied=largest_copy(small.as_text()),
        kept=memory.alias_size_in_bytes >= pools,
        named=named,
    )


def main() -> None:
    """Counts the kernels of the programs that are named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels_pallas.programs")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--json", action="store_true", help="all figures, as JSON")
    parser.add_argument("--kernels", action="store_true", help="the kernels of a layer by name")
    options = parser.parse_args()
    names = options.names or NAMES
    folder = Path(tempfile.mkdtemp())
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    os.environ["JAX_PLATFORMS"] = "cpu,cuda"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0"  # most tests leave them out
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    if options.json:
        print(json.dumps({name: asdict(count(name, folder)) for name in names}))
        return
    print("program           kernels  loops  alone  temporary  a layer's  copied  cache")
    for name in names:
        found = count(name, folder)
        sizes = (found.temporary, found.added, found.copied)
        temporary, added, copied = (f"{size / (1 << 20):.1f} MiB" for size in sizes)
        print(
            f"{name:<17} {found.kernels:7} {found.loops:6} {found.alone:6} {temporary:>10} "
            f"{added:>10} {copied:>7}  {'in place' if found.kept else 'COPIED'}",
            flush=True,
        )
        if options.kernels:
            for kernel, each in sorted(found.named.items(), key=lambda one: -one[1]):
                print(f"  {each:5.1f}  {kernel}", flush=True)


if __name__ == "__main__":
    main()
