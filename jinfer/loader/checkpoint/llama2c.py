"""llama2.c's .bin files: versions 0 (no magic), 1 (float32) and 2 (int8 groups, "Q8_0").

Source: export.py and the readers run.c and runq.c of karpathy/llama2.c. Every version stores the
same tensors without names, grouped by kind and then by layer, so only sizes can be checked.

Version 2 stores a weight as its int8 values, then a float32 scale for each group of
`group_size` consecutive values (what runq.c reads).
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from jinfer.loader.checkpoint.checkpoint_reader import Checkpoint, CheckpointError, Tensor
from jinfer.loader.checkpoint.mapped_file import MappedFile, as_array

MAGIC = struct.pack("<I", 0x616B3432)
_HEADER_V0 = struct.Struct("<7i")
_HEADER = struct.Struct("<4xi7iBi")  # magic, version, sizes, shared flag, group size
_HEADER_BYTES = 256
_FLOAT32 = np.dtype(np.float32)
_MAX_SCALE = np.finfo(np.float32).max / 128  # 128 times as much is still finite


@dataclass(frozen=True)
class Header:
    """The header of a file; `vocab_size` is positive, `group_size` is 0 except in version 2."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    max_seq_len: int
    version: int
    shared_classifier: bool
    group_size: int


@dataclass(frozen=True)
class _Group:
    """Consecutive tensors of equal shape, one a layer; `pattern` is empty for skipped bytes."""

    pattern: str
    shape: tuple[int, ...]
    count: int = 1
    quantized: bool = False


def open_llama2c(path: Path) -> Checkpoint:
    """Open a llama2.c checkpoint.

    Tensors have the names of the model it was exported from, weights the shape [out, in].

    Raises:
        CheckpointError: an invalid header, or a file of another size than it implies.
    """
    file = MappedFile(path)
    header, offset = _read_header(file)
    tensors: dict[str, Tensor] = {}
    for group in _groups(header):
        nbytes = _stored_bytes(group, header)
        for layer in range(group.count):
            if group.pattern:
                name = group.pattern.format(i=layer)
                tensors[name] = _tensor(file, name, group, header.group_size, offset, nbytes)
            offset += nbytes
    return Checkpoint(path, "llama2c", tensors, asdict(header))


def looks_like_v0(file: MappedFile) -> bool:
    """Whether a file without a magic is exactly as long as a version 0 header would imply."""
    try:
        return _expected_size(_parse_v0(file), _HEADER_V0.size) == file.size
    except CheckpointError:
        return False


def _read_header(file: MappedFile) -> tuple[Header, int]:
    """The header and the offset of the first tensor."""
    if file.read(0, len(MAGIC)) == MAGIC:
        header, start = _parse_versioned(file), _HEADER_BYTES
    else:
        header, start = _parse_v0(file), _HEADER_V0.size
    expected = _expected_size(header, start)
    if expected != file.size:
        reason = (
            f"a llama2.c version {header.version} header implies {expected} bytes, the file has "
            f"{file.size}: it is cut short, or it is another format"
        )
        raise CheckpointError(file.path, reason, 0)
    return header, start


def _parse_v0(file: MappedFile) -> Header:
    *sizes, vocab, length = _HEADER_V0.unpack(file.read(0, _HEADER_V0.size))
    # a negative vocabulary says that the classifier has weights of its own
    header = Header(*(*sizes, abs(vocab), length, 0, vocab > 0, 0))
    _check(file, header)
    return header


def _parse_versioned(file: MappedFile) -> Header:
    fields = _HEADER.unpack(file.read(0, _HEADER_BYTES)[: _HEADER.size])
    version, *sizes, shared, group_size = fields
    if version not in (1, 2):
        raise CheckpointError(file.path, f"llama2.c version {version}: only 0, 1, 2 are known", 4)
    if shared not in (0, 1):
        reason = f"the shared classifier flag is {shared}, neither 0 nor 1"
        raise CheckpointError(file.path, reason, 36)
    header = Header(*(*sizes, version, bool(shared), group_size if version == 2 else 0))
    _check(file, header)
    return header


def _check(file: MappedFile, header: Header) -> None:
    def fail(reason: str) -> CheckpointError:
        return CheckpointError(file.path, f"not a llama2.c header: {reason}", 0)

    optional = {"version", "shared_classifier"} | ({"group_size"} if header.version < 2 else set())
    for key, value in asdict(header).items():
        if value < 1 and key not in optional:
            raise fail(f"{key} is {value}")
    if header.dim % header.n_heads:
        raise fail(f"dim {header.dim} is not a multiple of n_heads {header.n_heads}")
    if header.n_heads % header.n_kv_heads:
        raise fail(f"n_heads {header.n_heads} is not a multiple of n_kv_heads {header.n_kv_heads}")
    for group in _groups(header):
        if group.quantized and math.prod(group.shape) % header.group_size:
            raise fail(f"{group.pattern} is not made of groups of {header.group_size}")


def _groups(header: Header) -> list[_Group]:
    """Everything after the header, in the file's order."""
    dim, layers = header.dim, header.n_layers
    embedding = (header.vocab_size, dim)
    kv_dim = dim // header.n_heads * header.n_kv_heads
    quantized = header.version == 2

    def norm(name: str) -> _Group:
        return _Group(f"layers.{{i}}.{name}.weight", (dim,), layers)

    def linear(name: str, size: int, inputs: int) -> _Group:
        return _Group(f"layers.{{i}}.{name}.weight", (size, inputs), layers, quantized)

    attention_norm, ffn_norm = norm("attention_norm"), norm("ffn_norm")
    last_norm = _Group("norm.weight", (dim,))
    embed = _Group("tok_embeddings.weight", embedding, quantized=quantized)
    attention = [
        linear("attention.wq", dim, dim),
        linear("attention.wk", kv_dim, dim),
        linear("attention.wv", kv_dim, dim),
        linear("attention.wo", dim, dim),
    ]
    ffn = [
        linear("feed_forward.w1", header.hidden_dim, dim),
        linear("feed_forward.w2", dim, header.hidden_dim),
        linear("feed_forward.w3", header.hidden_dim, dim),
    ]
    output = [] if header.shared_classifier else [_Group("output.weight", embedding, 1, quantized)]
    if header.version:
        return [attention_norm, ffn_norm, last_norm, embed, *attention, *ffn, *output]
    # cosines and sines of rotary positions, which readers compute themselves
    tables = _Group("", (header.max_seq_len, dim // header.n_heads // 2), 2)
    return [embed, attention_norm, *attention, ffn_norm, *ffn, last_norm, tables, *output]


def _stored_bytes(group: _Group, header: Header) -> int:
    """Return the size of a tensor of the group."""
    count = math.prod(group.shape)
    return count + 4 * (count // header.group_size) if group.quantized else 4 * count


def _expected_size(header: Header, start: int) -> int:
    return start + sum(group.count * _stored_bytes(group, header) for group in _groups(header))


def _tensor(
    file: MappedFile, name: str, group: _Group, group_size: int, offset: int, nbytes: int
) -> Tensor:
    raw = functools.partial(file.view, offset, nbytes)
    if group.quantized:
        read = functools.partial(_decode, file, name, offset, nbytes, group.shape, group_size)
        return Tensor(name, group.shape, f"Q8_G{group_size}", nbytes, read, raw)

    def read_float() -> np.ndarray:
        return as_array(file.view(offset, nbytes), _FLOAT32, group.shape)

    return Tensor(name, group.shape, "F32", nbytes, read_float, raw)


def _decode(
    file: MappedFile,
    name: str,
    offset: int,
    nbytes: int,
    shape: tuple[int, ...],
    group_size: int,
) -> np.ndarray:
    """int8 [groups, group_size] times float32 scales [groups], as float32 `shape`."""
    count = math.prod(shape)
    values = file.view(offset, count).view(np.int8).reshape(-1, group_size)
    scales = as_array(file.view(offset + count, nbytes - count), _FLOAT32, (len(values), 1))
    # a short-lived version of the exporter put all scales at the end of the file: same size,
    # other meaning, and int8 values read as scales soon include a negative number
    with np.errstate(invalid="ignore"):  # NaN is what is looked for
        are_scales = np.all((scales >= 0) & (scales <= _MAX_SCALE))
    if not are_scales:
        reason = f"tensor {name}: a scale is negative or not finite; export the file again"
        raise CheckpointError(file.path, reason, offset + count)
    decoded = np.multiply(values, scales, dtype=np.float32).reshape(shape)
    decoded.flags.writeable = False
    return decoded
