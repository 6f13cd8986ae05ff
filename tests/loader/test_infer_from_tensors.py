"""Heads that are said to be tied, and positions said to be sinusoids: the file decides."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfer import LLM
from jinfer.cli.inspect.match_checkpoint import describe
from jinfer.cli.quantize.quantize_checkpoint import convert
from jinfer.loader.checkpoint import Tensor, open_checkpoint
from jinfer.loader.open_model import open_files
from jinfer.loader.resolve_model import resolve_model
from jinfer.loader.weights.tensor_mapping import LoadError, find_origins, same_values
from jinfer.modelspec.position_blocks import SinusoidalPositionsSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.nn.positions import sinusoids
from tests.families.gguf_files import write_gguf
from tests.loader.weights.loading import lazy

GOLDENS = Path(__file__).parents[1] / "goldens"
IDS = [5, 9, 2, 40, 7, 3]
# Goldens whose heads are tied -> the embedding, and the head that their files could have.
TIED = {
    "gemma": ("model.embed_tokens.weight", "lm_head.weight"),
    "minicpm": ("model.embed_tokens.weight", "lm_head.weight"),
    "gpt2": ("wte.weight", "lm_head.weight"),
    "falcon7b": ("transformer.word_embeddings.weight", "lm_head.weight"),
    "bert": ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    "roberta": ("roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"),
    "distilbert": ("distilbert.embeddings.word_embeddings.weight", "vocab_projector.weight"),
    "t5": ("shared.weight", "lm_head.weight"),
    "bart": ("model.shared.weight", "lm_head.weight"),
    "m2m100": ("model.shared.weight", "lm_head.weight"),
}


def with_tensors(folder: Path, name: str, change: Any) -> Path:
    """A copy of a golden of one safetensors file, its tensors changed."""
    shutil.copytree(GOLDENS / name, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def parameters(source: Path) -> dict[str, Any]:
    """Each parameter's name -> the tensor it is read from."""
    opened = open_files(source, {})
    spec, _ = resolve_model(opened, {})
    origins = find_origins(build_abstract_model(spec, "float32"), opened.checkpoint, spec.tensors)
    return {name: origin.tensors[0] for name, origin in origins.items()}


def embedding_of(name: str) -> str:
    embed = TIED[name][0]
    names = open_checkpoint(GOLDENS / name).tensors
    return embed if embed in names else f"transformer.{embed}"


@pytest.mark.parametrize("name", [n for n in TIED if (GOLDENS / n / "model.safetensors").exists()])
def test_a_head_of_its_own(name: str, tmp_path: Path) -> None:
    head, embed = TIED[name][1], embedding_of(name)
    source = with_tensors(tmp_path / "equal", name, lambda t: t.update({head: t[embed].copy()}))
    assert "logits.weight" not in parameters(source)
    assert describe(source, {}).fits

    def differ(tensors: dict[str, np.ndarray]) -> None:
        tensors[head] = tensors[embed].copy()
        tensors[head][-1, -1] += 1

    source = with_tensors(tmp_path / "differs", name, differ)
    assert parameters(source)["logits.weight"].name == head
    (row,) = (row for row in describe(source, {}).rows if row.tensor.name == head)
    assert row.parameters == ["logits.weight"]


def gguf_with_head(path: Path, name: str, head: np.ndarray) -> Path:
    """A golden GGUF of float tensors, with an output matrix beside its embedding."""
    source = open_checkpoint(GOLDENS / name)
    architecture = source.metadata["general.architecture"]
    keys = {
        key.removeprefix(f"{architecture}."): value
        for key, value in source.metadata.items()
        if key.startswith(f"{architecture}.")
    }
    tensors = {n: np.asarray(t.read(), np.float32) for n, t in source.tensors.items()}
    keys["vocab_size"] = len(head)
    write_gguf(path, architecture, keys, tensors | {"output.weight": head})
    return path


@pytest.mark.parametrize(
    ("name", "scale"), [("gguf_gemma", 1.0), ("gguf_minicpm", None)], ids=["gemma", "minicpm"]
)
def test_an_untied_gguf_of_a_tied_family(name: str, scale: float | None, tmp_path: Path) -> None:
    """Its logits are its hidden states times its own head."""
    embed = np.asarray(open_checkpoint(GOLDENS / name).tensors["token_embd.weight"].read())
    head = np.random.default_rng(3).normal(size=embed.shape).astype(np.float32)
    source = gguf_with_head(tmp_path / "model.gguf", name, head)
    llm = LLM(source, dtype="float32")
    divisor = llm.spec.dims.get("logits_divisor", 1) if scale is None else scale
    hidden = llm.hidden([IDS])[0].astype(np.float64)
    wanted = hidden @ head.T.astype(np.float64) / divisor
    np.testing.assert_allclose(llm.logits([IDS])[0], wanted, rtol=0, atol=2e-4)
    copy = gguf_with_head(tmp_path / "copy.gguf", name, embed.astype(np.float32))
    assert "logits.weight" not in parameters(copy)


def test_a_converted_head_of_its_own(tmp_path: Path) -> None:
    """A converted checkpoint cannot be compared: what it holds says what was found."""

    def differ(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = -tensors["model.embed_tokens.weight"]

    source = with_tensors(tmp_path / "source", "gemma", differ)
    wanted = LLM(source, dtype="float32").logits([IDS])[0]
    for weights in ("plain", "q8"):
        overrides = {"quantization": {"weights": weights, "threshold": 0}}
        convert(str(source), tmp_path / weights, overrides)
        got = LLM(tmp_path / weights, dtype="float32").logits([IDS])[0]
        assert np.abs(got - wanted).max() < (1e-4 if weights == "plain" else 0.5)
    convert(str(GOLDENS / "gemma"), tmp_path / "tied", {})
    assert "logits.weight" not in LLM(tmp_path / "tied")._engine.runner.model.names


def never() -> np.ndarray:
    raise AssertionError("is not to be decoded")


def stored(type: str, raw: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    return Tensor("t", shape, type, raw.size, never, lambda: raw)


def test_tensors_of_a_type_are_compared_without_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jinfer.loader.weights.tensor_mapping.PIECE", 64)
    raw = np.random.default_rng(0).integers(0, 256, 40 * 18 * 2, dtype=np.uint8)
    one, other = (stored("Q4_0", raw.copy(), (40, 64)) for _ in range(2))
    assert same_values(one, other)
    other.raw()[-1] ^= 1
    assert not same_values(one, other)
    assert not same_values(one, stored("Q4_0", raw, (20, 128)))


def test_tensors_of_different_types_are_compared_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jinfer.loader.weights.tensor_mapping.PIECE", 64)
    values = np.random.default_rng(0).normal(size=(40, 32)).astype(ml_dtypes.bfloat16)
    half = Tensor("half", (40, 32), "BF16", 2, lambda: values, never)
    wide = values.astype(np.float32)
    assert same_values(half, lazy("wide", (40, 32), lambda: wide))
    wide[-1, -1] += 1
    assert not same_values(half, lazy("wide", (40, 32), lambda: wide))


def test_a_quantized_copy_is_a_head_of_its_own(tmp_path: Path) -> None:
    """Of a table in two formats the head's is what its maker chose for it."""
    embed = np.random.default_rng(1).normal(size=(40, 32)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "two.gguf", "x")
    writer.add_tensor("a", embed)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("b", gguf.quants.quantize(embed, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = open_checkpoint(tmp_path / "two.gguf").tensors
    assert not same_values(tensors["a"], tensors["b"])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_stored_sinusoids_are_no_parameter(dtype: Any, tmp_path: Path) -> None:
    block = SinusoidalPositionsSpec(kind="sinusoidal_positions", width=64)
    table = sinusoids(block, np.arange(128)).astype(np.float32)

    def change(tensors: dict[str, np.ndarray]) -> None:
        for side in ("encoder", "decoder"):
            tensors[f"model.{side}.embed_positions.weight"] = table.astype(dtype)

    folder = with_tensors(tmp_path / "model", "pegasus", change)
    assert not {"encoder.position.weight", "decoder.position.weight"} & parameters(folder).keys()
    assert describe(folder, {}).fits
    table[77, 3] += 0.02
    folder = with_tensors(tmp_path / "differs", "pegasus", change)
    assert {"encoder.position.weight", "decoder.position.weight"} <= parameters(folder).keys()


def test_stored_positions_under_their_older_name(tmp_path: Path) -> None:
    """M2M100's: a row before the first position is for the padding."""
    block = SinusoidalPositionsSpec(
        kind="sinusoidal_positions", width=64, offset=2, frequencies="tensor2tensor"
    )
    table = sinusoids(block, np.arange(-2, 128)).astype(np.float32)
    table[1] = 0

    def change(tensors: dict[str, np.ndarray]) -> None:
        for side in ("encoder", "decoder"):
            tensors[f"model.{side}.embed_positions.weights"] = table.copy()

    folder = with_tensors(tmp_path / "model", "m2m100", change)
    assert not {"encoder.position.weight", "decoder.position.weight"} & parameters(folder).keys()
    assert describe(folder, {}).fits
    asked: Any = {"encoder_ids": [IDS]}
    plain = LLM(GOLDENS / "m2m100", dtype="float32").logits([IDS], **asked)[0]
    table[2 + 3] *= -1
    folder = with_tensors(tmp_path / "differs", "m2m100", change)
    assert {"encoder.position.weight", "decoder.position.weight"} <= parameters(folder).keys()
    differing = LLM(folder, dtype="float32").logits([IDS], **asked)[0]
    assert np.abs(differing - plain).max() > 1e-2


COPIES = {  # golden -> a parameter's tensor, and one that repeats it
    "t5": ("shared.weight", "decoder.embed_tokens.weight"),
    "bart": ("model.shared.weight", "model.encoder.embed_tokens.weight"),
    "m2m100": ("model.shared.weight", "model.decoder.embed_tokens.weight"),
    "bert": ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    "roberta": ("lm_head.bias", "lm_head.decoder.bias"),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_that_differ_are_refused(name: str, tmp_path: Path) -> None:
    own, copy = COPIES[name]

    def repeat(tensors: dict[str, np.ndarray], more: float) -> None:
        tensors[copy] = tensors[own].copy()
        tensors[copy].reshape(-1)[-1] += more

    folder = with_tensors(tmp_path / "equal", name, lambda t: repeat(t, 0))
    assert describe(folder, {}).fits
    folder = with_tensors(tmp_path / "differs", name, lambda t: repeat(t, 1))
    with pytest.raises(LoadError, match=f"{copy} differs from {own}, though the spec.* a copy"):
        parameters(folder)
    found = describe(folder, {})
    assert not found.fits
    assert copy in found.wrong[0]
    assert describe(folder, {"tensors": {"ignore": [copy]}}).fits


def test_stored_positions_end_where_their_table_does(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        name = "model.decoder.embed_positions.weight"
        tensors[name] = tensors[name][:100].copy()

    folder = with_tensors(tmp_path / "model", "pegasus", change)
    with pytest.raises(SpecError, match=r"dims.context: is 128, but model.decoder.embed_pos.* 100"):
        resolve_model(open_files(folder, {}), {})
    spec, _ = resolve_model(open_files(folder, {}), {"dims": {"context": 100}})
    assert spec.dims["context"] == 100


def test_converted_positions(tmp_path: Path) -> None:
    convert(str(GOLDENS / "pegasus"), tmp_path / "out", {})
    got, wanted = (
        LLM(source, dtype="float32") for source in (tmp_path / "out", GOLDENS / "pegasus")
    )
    asked: Any = {"encoder_ids": [IDS]}
    assert np.array_equal(got.logits([IDS], **asked)[0], wanted.logits([IDS], **asked)[0])
