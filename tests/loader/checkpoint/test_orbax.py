"""Converted checkpoints in Orbax's folders: the same parameters, in shards."""

import os
import shutil
import subprocess
import sys
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from jinfer import LLM
from jinfer.cli.quantize.quantize_checkpoint import convert
from jinfer.cli.quantize.write_native import CHUNK_BYTES, OrbaxWriter
from jinfer.loader.checkpoint import Checkpoint
from jinfer.loader.checkpoint.checkpoint_reader import DTYPES
from jinfer.loader.checkpoint.native_checkpoint import native_metadata
from jinfer.loader.checkpoint.orbax import DESCRIPTION, FOLDER, open_orbax, orbax_api, restore
from tests.loader.checkpoint.converting import GOLDENS, IDS, MODEL, SMALL, check_equal, leaves, load

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("source", "quantization"),
    [
        ("llama2", {"weights": "q4", **SMALL}),
        ("llama2", {"weights": "q3.5", **SMALL, "outliers": 0.01}),
        ("llama2", {"weights": "q4", **SMALL, "outliers": 1e-9}),  # arrays of no element
        ("llama2", {"weights": "plain"}),
        ("gguf_llama_mixed", {}),  # blocks as they are in the file
        ("mixtral", {"weights": "q8", **SMALL}),
        ("llama2c_v0_tied/model.bin", {"weights": "q8", **SMALL}),
    ],
)
def test_converted_checkpoint_equals_its_source(
    source: str, quantization: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    convert(str(GOLDENS / source), out, {"quantization": quantization}, orbax=True)
    check_equal(leaves(out), leaves(GOLDENS / source, **quantization))
    assert not [path for path in out.rglob("*") if path.suffix == ".safetensors"]


@pytest.mark.parametrize(
    "quantization", [{"weights": "q4"}, {"weights": "q3.5", "outliers": 0.01}], ids=["q4", "q3.5"]
)
def test_logits_are_those_of_the_other_files(quantization: dict[str, Any], tmp_path: Path) -> None:
    tables = {"quantization": {**quantization, **SMALL}}
    convert(str(MODEL), tmp_path / "files", tables)
    convert(str(MODEL), tmp_path / "orbax", tables, orbax=True)
    expected = LLM(tmp_path / "files").logits([IDS])[0]
    assert np.array_equal(LLM(tmp_path / "orbax").logits([IDS])[0], expected)


def test_large_models_are_written_in_pieces(tmp_path: Path) -> None:
    tables = {"quantization": {"weights": "q4", **SMALL}}
    convert(str(MODEL), tmp_path / "out", tables, shard_bytes=80_000, orbax=True)
    assert len(list((tmp_path / "out" / FOLDER / "state").glob("ocdbt.process_*"))) > 2
    check_equal(leaves(tmp_path / "out"), leaves(MODEL, weights="q4", **SMALL))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_plain_parameters_are_cast_to_the_requested_dtype(dtype: str, tmp_path: Path) -> None:
    tables = {"quantization": {"weights": "plain"}}
    convert(str(MODEL), tmp_path / "files", tables)
    convert(str(MODEL), tmp_path / "orbax", tables, orbax=True)
    ours = load(tmp_path / "orbax", {"dtype": dtype})
    assert ours["embed.weight"].dtype == dtype
    check_equal(ours, load(tmp_path / "files", {"dtype": dtype}))


@pytest.mark.parametrize("outliers", [0.0, 0.01])
def test_a_gpu_may_want_other_columns(
    outliers: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"weights": "q3.5", **SMALL, "outliers": outliers}
    convert(str(MODEL), tmp_path / "out", {"quantization": settings}, orbax=True)
    monkeypatch.setattr("jinfer.loader.weights.storage_plan.columns_here", lambda format: 16)
    monkeypatch.setattr("jinfer.loader.weights.native_parameters.columns_here", lambda format: 16)
    check_equal(leaves(tmp_path / "out"), leaves(MODEL, **settings))


SHARDED = """
import sys
from pathlib import Path
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jinfer.loader.checkpoint import open_checkpoint
from jinfer.loader.checkpoint.checkpoint_reader import DTYPES
from jinfer.loader.checkpoint.orbax import restore

mesh = jax.make_mesh((2, 2), ("x", "y"))

def spread(tensor):
    # The longest axis over four devices, or two; what cannot be cut is on all of them.
    axis = int(np.argmax(tensor.shape)) if tensor.shape else 0
    for names in (("x", "y"), "x"):
        if tensor.shape and tensor.shape[axis] % (4 if names == ("x", "y") else 2) == 0:
            spec = PartitionSpec(*(names if i == axis else None for i in range(len(tensor.shape))))
            break
    else:
        spec = PartitionSpec()
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(tensor.shape, DTYPES[tensor.type], sharding=sharding)

orbax, files = (open_checkpoint(Path(source)) for source in sys.argv[1:])
wanted = {name: spread(tensor) for name, tensor in orbax.parts.items()}
cut = 0
for name, array in restore(orbax, wanted).items():
    like = wanted[name]
    assert array.sharding == like.sharding, (array.sharding, like.sharding)
    assert len(array.addressable_shards) == 4
    for shard in array.addressable_shards:
        assert shard.data.shape == like.sharding.shard_shape(like.shape)
        assert shard.data.devices() == {shard.device}
    held = sum(shard.data.nbytes for shard in array.addressable_shards)
    if like.sharding.spec and like.sharding.spec[np.argmax(like.shape)] == ("x", "y"):
        assert held == array.nbytes
        cut += 1
    values = files.parts[name].read()
    assert array.dtype == values.dtype
    assert np.array_equal(array, values)
assert cut > 20, cut
print("good")
"""


def test_each_device_holds_its_shard_only(tmp_path: Path) -> None:
    """Orbax's folder and memory-mapped files give the same arrays on a mesh."""
    tables = {"quantization": {"weights": "q4", "outliers": 0.01, **SMALL}}
    convert(str(MODEL), tmp_path / "files", tables)
    convert(str(MODEL), tmp_path / "orbax", tables, orbax=True)
    done = run(SHARDED, tmp_path / "orbax", tmp_path / "files", devices=4)
    assert done == "good\n"


def run(program: str, *arguments: object, devices: int = 1) -> str:
    """What a program prints, in a process of its own."""
    flags = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write(folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    """A converted checkpoint of no model; gives its description."""
    folder.mkdir()
    writer = OrbaxWriter(folder, 128 << 20)
    for name, array in arrays.items():
        writer.add({name: array})
    writer.finish(native_metadata(Checkpoint(folder, "safetensors", {}, {}), {}, {}, {}))
    return folder / DESCRIPTION


@settings(max_examples=15)
@given(
    st.dictionaries(
        st.text(st.characters(categories=["L", "N"], include_characters="._/ '"), min_size=1),
        st.tuples(
            st.sampled_from([DTYPES[kind] for kind in ("U32", "F16", "I8", "I32", "F32", "BF16")]),
            st.lists(st.integers(0, 9), max_size=6),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2**32 - 1),
)
@example({"a.words": (DTYPES["U32"], [5, 3, 2]), "none": (DTYPES["F32"], [3, 0])}, 0)
def test_arrays_of_any_kind(kinds: dict[str, tuple[np.dtype, list[int]]], seed: int) -> None:
    """All bits come back; an array can be restored without the others."""
    rng = np.random.default_rng(seed)
    arrays = {
        name: np.frombuffer(rng.bytes(prod(shape) * dtype.itemsize), dtype).reshape(shape)
        for name, (dtype, shape) in kinds.items()
    }
    assume(any(array.size for array in arrays.values()))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_orbax(write(Path(folder) / "out", arrays))
        expected = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in arrays.items()}
        ours = restore(checkpoint, expected)
        last = list(arrays)[-1]
        alone = restore(checkpoint, {last: expected[last]})
    assert ours.keys() == arrays.keys()
    assert alone.keys() == {last}
    for name, array in [*ours.items(), *alone.items()]:
        assert (array.dtype, array.shape) == (arrays[name].dtype, arrays[name].shape)
        assert np.asarray(array).tobytes() == arrays[name].tobytes(), name


def test_chunks_can_be_read_by_rows_and_by_columns(tmp_path: Path) -> None:
    arrays = {
        "packed.words": np.zeros((2048, 6, 4, 1, 32), np.uint32),
        "experts.words": np.zeros((4, 512, 4, 4, 1, 32), np.uint32),
        "small.words": np.zeros((64, 6, 4, 1, 32), np.uint32),
        "plain": np.zeros((1024, 1024), np.float32),
    }
    path = write(tmp_path / "out", arrays)
    found = orbax_api(path).metadata(path.parent / FOLDER).metadata
    chunks = {name: found[name].storage_metadata.chunk_shape for name in arrays}
    assert chunks["packed.words"] == (2048, 1, 4, 1, 32)
    assert chunks["experts.words"] == (1, 512, 1, 4, 1, 32)
    assert chunks["small.words"] == arrays["small.words"].shape
    assert max(chunks["plain"]) < 1024
    for name, array in arrays.items():
        assert np.prod(chunks[name]) * array.itemsize <= CHUNK_BYTES


RESTORING = """
import sys
from pathlib import Path
import jax
from jinfer.loader.checkpoint.checkpoint_reader import DTYPES
from jinfer.loader.checkpoint.orbax import open_orbax, orbax_api, restore

def peak():
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    return int(status["VmHWM"].split()[0]) << 10

checkpoint = open_orbax(Path(sys.argv[1]))
orbax_api(checkpoint.path)
jax.block_until_ready(jax.device_put(1.0))
before = peak()
parts = checkpoint.parts.items()
arrays = restore(checkpoint, {n: jax.ShapeDtypeStruct(p.shape, DTYPES[p.type]) for n, p in parts})
jax.block_until_ready(arrays)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the peak")
def test_restoring_holds_no_second_copy(tmp_path: Path) -> None:
    words = np.random.default_rng(0).integers(0, 2**32, (4096, 4, 4, 2, 32), dtype=np.uint32)
    names = [f"decoder.{i}.attn.q.weight.words" for i in range(24)]
    try:
        more = int(run(RESTORING, write(tmp_path / "out", dict.fromkeys(names, words))))
    finally:
        shutil.rmtree(tmp_path / "out")  # pytest would keep it
    assert more < 1.5 * len(names) * words.nbytes
