"""Compiles kernels for an H200 without one and counts their instructions.

Run as a program, because JAX needs to know the platform before it starts:
`python -m tests.kernels_pallas.sass NAME...` prints JSON, target -> the `Code` of its kernels.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# The properties of an H200, as XLA's GpuTargetConfigProto.
H200_PROPERTIES = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4814000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""


# The names of kernels, which something may follow.
KERNELS = r"\w*packed_product|decode_matrices|dense_experts|prepare_rows|enter_cache"
KERNELS += r"|\w+_attention|find_digit"


@dataclass(frozen=True)
class Code:
    """A kernel's machine code.

    Attributes:
        name: of the kernel.
        registers, spilled: registers of a thread, and bytes that did not fit into them.
        loop: instructions of its longest loop, or of all where there is none.
        counts: of the loop's instructions by name.
        early: whether it lets the next kernel begin, and not before it has waited for the last one.
        copies: operations of the program around it that copy or convert an array.
    """

    name: str
    registers: int
    spilled: int
    loop: int
    counts: dict[str, int]
    early: bool
    copies: list[str]


def tools() -> tuple[Path, Path] | None:
    """The assembler and the disassembler that Triton carries."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "backends" / "nvidia" / "bin"
    newest = folder / "ptxas-blackwell"  # reads the PTX of CUDA 13
    ptxas = newest if newest.exists() else folder / "ptxas"
    disassembler = folder / "nvdisasm"
    return (ptxas, disassembler) if ptxas.exists() and disassembler.exists() else None


def instructions(listing: str) -> list[str]:
    """The instructions of nvdisasm's listing that lie in the longest loop."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x?_?\d+):", line):
            labels[label[1]] = len(code)
        if found := re.search(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", line):
            code.append(found[1])
    loops = [(0, 0)]
    for place, text in enumerate(code):
        jump = re.search(r"BRA\b.*?`\((\.L_x?_?\d+)\)", text)
        if jump and labels.get(jump[1], place) < place - 20:
            loops.append((labels[jump[1]], place + 1))
    begin, end = max(loops, key=lambda loop: loop[1] - loop[0])
    return code[begin:end] if end else code


def name_of(instruction: str) -> str:
    """`@!P0 LDG.E.128 R4, ...` -> `LDG.E.128`."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]


def compile_target(target: Any, folder: Path) -> list[Code]:
    """Compiles one target; the code of its kernels."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from tests.kernels_pallas.helpers import H200

    for old in folder.iterdir():
        old.unlink()
    described = topologies.get_topology_desc(
        platform="cuda", target_config=H200_PROPERTIES, topology="1x1x1"
    )
    sharding = SingleDeviceSharding(described.devices[0])
    args = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), target.args
    )
    with jax.sharding.use_abstract_mesh(H200):
        compiled = jax.jit(target.function).trace(*args).lower().compile()
    weights = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(args))
    results = {leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(compiled.out_info)}
    copies = [
        line.strip()
        for line in compiled.as_text().splitlines()
        if re.search(r"= \S+ (copy|dynamic-slice|fusion)\(", line)
        and _bytes(line) > weights // 16
        and _bytes(line) not in results
    ]
    return [
        _code(ptx, name[1], copies)
        for ptx in sorted(folder.glob("*.ptx"))
        if (name := re.search(rf"\.entry ((?:{KERNELS})\w*)", ptx.read_text()))
    ]


def _code(ptx: Path, name: str, copies: list[str]) -> Code:
    """What the assembler makes of a kernel."""
    found = tools()
    assert found is not None
    cubin = ptx.with_suffix(".cubin")
    log = subprocess.run(
        [found[0], "-v", "-arch=sm_90a", ptx, "-o", cubin],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    listing = subprocess.run(
        [found[1], "-c", cubin], capture_output=True, text=True, check=True
    ).stdout
    loop = instructions(listing)
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))
    (registers,) = re.findall(r"Used (\d+) registers", log)
    counts = Counter(name_of(text) for text in loop)
    early = re.search(r"\bACQBULK\b.*\bPREEXIT\b", listing, re.DOTALL) is not None
    return Code(name, int(registers), spilled, len(loop), dict(counts), early, copies)


def _bytes(line: str) -> int:
    """Of the array that a line of HLO makes."""
    kind = re.search(r"= (\w+?)(\d+)\[([\d,]*)\]", line)
    if kind is None:
        return 0
    size = int(kind[2]) // 8
    for dim in filter(None, kind[3].split(",")):
        size *= int(dim)
    return size


def main() -> None:
    """Compiles the targets that are named on the command line."""
    folder = Path(tempfile.mkdtemp())
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_emitter_re=ptx|llvm"
    # With dumps, LLVM looks its own calls up for each of Triton's remarks: ten seconds a product.
    os.environ["LLVM_DISABLE_SYMBOLIZATION"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu,cuda"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0"  # as users' programs are compiled
    from tests.kernels_pallas.targets import compiled_targets

    chosen = [target for target in compiled_targets() if target.name in sys.argv[1:]]
    codes = {target.name: compile_target(target, folder) for target in chosen}
    print(json.dumps({name: list(map(asdict, each)) for name, each in codes.items()}))


if __name__ == "__main__":
    main()
