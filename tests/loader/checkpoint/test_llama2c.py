"""llama2.c checkpoints: layouts written here from the format's description, and real files."""

import struct
from pathlib import Path

import numpy as np
import pytest

from jinfer.loader.checkpoint import CheckpointError, open_checkpoint
from jinfer.loader.checkpoint.llama2c import open_llama2c

GOLDENS = Path(__file__).parents[2] / "goldens"
# dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len
TINY = (8, 12, 2, 4, 2, 6, 5)
GROUP = 4
MAGIC = b"24ka"


def quantized(values: np.ndarray) -> tuple[bytes, np.ndarray]:
    """int8 values then the scales of their groups, and what they stand for."""
    groups = values.reshape(-1, GROUP)
    scales = (np.abs(groups).max(axis=1) / 127).astype(np.float32)
    ints = np.round(groups / scales[:, None]).astype(np.int8)
    meant = ints.astype(np.float32) * scales[:, None]
    return ints.tobytes() + scales.tobytes(), meant.reshape(values.shape)


def build(
    sizes: tuple[int, ...], version: int, shared: bool
) -> tuple[bytes, dict[str, np.ndarray]]:
    """A file with random weights, and the tensors that a reader should find in it."""
    dim, hidden, layers, heads, kv_heads, vocab, length = sizes
    kv_dim = dim // heads * kv_heads
    norms = {"attention_norm": (dim,), "ffn_norm": (dim,)}
    linears = {
        "attention.wq": (dim, dim),
        "attention.wk": (kv_dim, dim),
        "attention.wv": (kv_dim, dim),
        "attention.wo": (dim, dim),
        "feed_forward.w1": (hidden, dim),
        "feed_forward.w2": (dim, hidden),
        "feed_forward.w3": (hidden, dim),
    }
    rng = np.random.default_rng(0)
    found: dict[str, np.ndarray] = {}

    def write(name: str, shape: tuple[int, ...]) -> bytes:
        values = rng.normal(size=shape).astype(np.float32)
        if version == 2 and len(shape) == 2:
            data, found[name] = quantized(values)
            return data
        found[name] = values
        return values.tobytes()

    def each(name: str, shape: tuple[int, ...]) -> bytes:
        return b"".join(write(f"layers.{i}.{name}.weight", shape) for i in range(layers))

    if version == 0:
        data = struct.pack("<7i", *sizes[:5], vocab if shared else -vocab, length)
        data += write("tok_embeddings.weight", (vocab, dim)) + each("attention_norm", (dim,))
        data += b"".join(each(n, s) for n, s in linears.items() if n.startswith("attention"))
        data += each("ffn_norm", (dim,))
        data += b"".join(each(n, s) for n, s in linears.items() if n.startswith("feed"))
        data += write("norm.weight", (dim,))
        data += bytes(2 * 4 * length * (dim // heads // 2))
    else:
        data = MAGIC + struct.pack("<i7iB", version, *sizes, shared)
        data += struct.pack("<i", GROUP) if version == 2 else b""
        data = data.ljust(256, b"\0")
        data += b"".join(each(n, s) for n, s in norms.items()) + write("norm.weight", (dim,))
        data += write("tok_embeddings.weight", (vocab, dim))
        data += b"".join(each(n, s) for n, s in linears.items())
    if not shared:
        data += write("output.weight", (vocab, dim))
    return data, found


def save(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("shared", [True, False])
def test_written_file_is_read_back(tmp_path: Path, version: int, shared: bool) -> None:
    data, expected = build(TINY, version, shared)
    checkpoint = open_checkpoint(save(tmp_path, data))
    assert checkpoint.format == "llama2c"
    assert checkpoint.metadata == {
        "dim": 8,
        "hidden_dim": 12,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "vocab_size": 6,
        "max_seq_len": 5,
        "version": version,
        "shared_classifier": shared,
        "group_size": GROUP if version == 2 else 0,
    }
    assert checkpoint.tensors.keys() == expected.keys()
    for name, values in expected.items():
        tensor = checkpoint.tensors[name]
        assert tensor.shape == values.shape
        assert tensor.type == ("Q8_G4" if version == 2 and values.ndim == 2 else "F32")
        np.testing.assert_array_equal(tensor.read(), values)
        assert tensor.raw().nbytes == tensor.nbytes
        assert not tensor.read().flags.writeable


@pytest.mark.parametrize("name", ["llama2c_v0", "llama2c_v0_tied", "llama2c_v2_q80"])
def test_golden_files_have_exactly_the_size(name: str) -> None:
    checkpoint = open_checkpoint(GOLDENS / name / "model.bin")
    assert checkpoint.metadata["dim"] == 64
    assert ("output.weight" in checkpoint.tensors) == (name == "llama2c_v0")
    for tensor in checkpoint.tensors.values():
        values = tensor.read()
        assert np.isfinite(values).all()
        assert 0.01 < values.std() < 10  # another layout would give noise or huge numbers


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("change", [-1, 1, 4])
def test_size_must_be_exact(tmp_path: Path, version: int, change: int) -> None:
    data, _ = build(TINY, version, True)
    path = save(tmp_path, data[:change] if change < 0 else data + bytes(change))
    with pytest.raises(CheckpointError, match=f"implies {len(data)} bytes.*{len(data) + change}"):
        open_llama2c(path)


IMPOSSIBLE = [
    (version, field, value)
    for version in (0, 1, 2)
    for field in range(7)
    for value in (0, -1, 2**31 - 1, -(2**31))
    # nothing in versions 1 and 2 depends on max_seq_len
    if not (version and field == 6 and value > 0)
]


@pytest.mark.parametrize(("version", "field", "value"), IMPOSSIBLE)
def test_impossible_header_is_refused(tmp_path: Path, version: int, field: int, value: int) -> None:
    data = bytearray(build(TINY, version, True)[0])
    start = (0 if version == 0 else 8) + 4 * field
    data[start : start + 4] = struct.pack("<i", value)
    with pytest.raises(CheckpointError, match=r"llama2\.c"):
        open_llama2c(save(tmp_path, bytes(data)))


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (4, 3, "version 3"),
        (36, 2, "neither 0 nor 1"),
        (37, 0, "group_size is 0"),
        (37, 5, "groups of 5"),
    ],
)
def test_bad_flags_are_refused(tmp_path: Path, offset: int, value: int, reason: str) -> None:
    data = bytearray(build(TINY, 2, True)[0])
    data[offset] = value
    with pytest.raises(CheckpointError, match=reason):
        open_llama2c(save(tmp_path, bytes(data)))


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf"), 3e38])
def test_scales_elsewhere_are_noticed(tmp_path: Path, scale: float) -> None:
    """A short-lived exporter wrote all scales last: same size, so only the values tell."""
    data = bytearray(build(TINY, 2, True)[0])
    data[-4:] = struct.pack("<f", scale)
    checkpoint = open_llama2c(save(tmp_path, bytes(data)))
    with pytest.raises(CheckpointError, match="scale is negative"):
        checkpoint.tensors["layers.1.feed_forward.w3.weight"].read()


@pytest.mark.parametrize("size", [0, 3, 27])
def test_short_file_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(CheckpointError, match="cut short"):
        open_llama2c(save(tmp_path, b"\1" * size))
