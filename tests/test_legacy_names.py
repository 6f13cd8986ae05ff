"""Checkpoints with the tensor names of older releases: the goldens, saved under these names."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfer import LLM
from jinfer.loader.checkpoint import open_checkpoint
from tests.loader.checkpoint.pickles import dict_of, storage, tensor, zip_file
from tests.reference.numpy_positions import sinusoids_fairseq

type Arrays = dict[str, np.ndarray]

GOLDENS = Path(__file__).parent / "goldens"
TOLERANCE = 2e-4
STORAGES = {"float32": "FloatStorage", "float16": "HalfStorage", "int64": "LongStorage"}


@cache
def golden(name: str) -> Arrays:
    tensors = open_checkpoint(GOLDENS / name).tensors
    return {name: np.ascontiguousarray(tensor.read()) for name, tensor in tensors.items()}


def without(prefix: str, file: Arrays) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in file.items()}


def gamma_and_beta(file: Arrays) -> Arrays:
    """Norms as TensorFlow called them, and the numbers of the positions."""
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): array
        for name, array in file.items()
    }
    return renamed | {"bert.embeddings.position_ids": np.arange(128)[None]}


def untied_decoder(file: Arrays) -> Arrays:
    """The vocabulary head's weight and bias a second time."""
    return file | {
        "cls.predictions.decoder.weight": file["bert.embeddings.word_embeddings.weight"],
        "cls.predictions.decoder.bias": file["cls.predictions.bias"],
    }


def with_masks(file: Arrays) -> Arrays:
    """Each attention with its causal mask, and the number that stands for "not seen"."""
    masks: Arrays = {}
    for name in [name for name in file if name.endswith(".attn.c_attn.bias")]:
        attention = name.removesuffix(".c_attn.bias")
        masks[f"{attention}.bias"] = np.tril(np.ones((1, 1, 160, 160), np.float32))
        masks[f"{attention}.masked_bias"] = np.full((), -1e4, np.float32)
    return file | masks


def with_head(file: Arrays) -> Arrays:
    return file | {"lm_head.weight": file["transformer.wte.weight"]}


def with_copies(file: Arrays) -> Arrays:
    """The embedding for either side and as the head, and the sinusoids, which are computed."""
    shared = file["model.shared.weight"]
    copies = {f"model.{side}.embed_tokens.weight": shared for side in ("encoder", "decoder")}
    table = sinusoids_fairseq(np.arange(258), 64).astype(np.float32)
    table[1] = 0  # of the padding
    tables = {f"model.{side}.embed_positions.weights": table for side in ("encoder", "decoder")}
    return file | copies | tables | {"lm_head.weight": shared}


OLD: dict[str, tuple[str, Callable[[Arrays], Arrays]]] = {
    "gamma and beta": ("bert", gamma_and_beta),
    "untied decoder": ("bert", lambda file: untied_decoder(gamma_and_beta(file))),
    "gpt2 without prefix": ("gpt2", lambda file: with_masks(without("transformer.", file))),
    "gpt2 with masks and head": ("gpt2", lambda file: with_masks(with_head(file))),
    "bloom without prefix": ("bloom", lambda file: without("transformer.", file)),
    "opt without prefix": ("opt350m", lambda file: without("model.", file)),
    "copies of the embedding": ("m2m100", with_copies),
}


def save_pickle(folder: Path, file: Arrays) -> None:
    """As torch writes it: tensors with the same values share their storage."""
    keys = {id(array): str(number) for number, array in enumerate(file.values())}
    items = {}
    for name, array in file.items():
        source = storage(keys[id(array)], array.size, STORAGES[array.dtype.name])
        strides = tuple(step // array.itemsize for step in array.strides)
        items[name] = tensor(source, array.shape, strides)
    data = {keys[id(array)]: array.tobytes() for array in file.values()}
    (folder / "pytorch_model.bin").write_bytes(zip_file(dict_of(**items), data))


def save_safetensors(folder: Path, file: Arrays) -> None:
    save_file(file, folder / "model.safetensors")


def rows(values: Arrays, name: str) -> list[list[int]]:
    """A padded batch without its padding."""
    mask = values["attention_mask"].astype(bool)
    return [row[seen].tolist() for row, seen in zip(values[name], mask, strict=True)]


def logits(llm: LLM, values: Arrays) -> list[np.ndarray]:
    texts = rows(values, "input_ids")
    if "decoder_input_ids" in values:
        return llm.logits(values["decoder_input_ids"].tolist(), encoder_ids=texts)
    if "token_type_ids" in values:
        return llm.logits(texts, token_type_ids=rows(values, "token_type_ids"))
    return llm.logits(texts)


@pytest.mark.parametrize("save", [save_pickle, save_safetensors])
@pytest.mark.parametrize("old", OLD)
def test_older_names(tmp_path: Path, old: str, save: Callable[[Path, Arrays], None]) -> None:
    name, rename = OLD[old]
    file = rename(golden(name))
    assert file.keys() != golden(name).keys()
    save(tmp_path, file)
    (tmp_path / "config.json").write_bytes((GOLDENS / name / "config.json").read_bytes())
    with np.load(GOLDENS / name / "expected.npz") as arrays:
        values = dict(arrays)
    got = logits(LLM(tmp_path, dtype="float32"), values)
    for ours, reference in zip(got, values["logits"], strict=True):
        np.testing.assert_allclose(ours, reference[: len(ours)], rtol=0, atol=TOLERANCE)
