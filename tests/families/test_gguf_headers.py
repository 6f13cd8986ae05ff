"""GGUF files of every architecture: the family is found, and every name and shape has its place."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.loader.config.unused_config import check_unused
from jinfer.loader.model_files import ModelFiles
from jinfer.loader.open_model import open_files
from jinfer.loader.resolve_model import family_of, resolve_model
from jinfer.loader.weights.tensor_mapping import find_origins
from jinfer.modelspec.feed_forward_blocks import GatedMLPSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.nn.abstract_model import build_abstract_model

from .gguf_files import write_gguf
from .gguf_headers import Header, headers

UNUSED = {"rwkv7": {f"blk.0.time_mix_v{i}.weight" for i in range(3)}}


def opened(folder: Path, header: Header) -> ModelFiles:
    """A file of zeros with this header."""
    tensors = {name: np.zeros(shape, np.float32) for name, shape in header.shapes.items()}
    write_gguf(folder / "m.gguf", header.architecture, header.keys, tensors)
    return open_files(str(folder / "m.gguf"), {})


def used(folder: Path, header: Header) -> set[str]:
    """The tensors that a model has a place for."""
    files = opened(folder, header)
    assert Path(family_of(files)).stem == header.family
    spec, unread = resolve_model(files, {})
    check_unused(unread, files.config, spec)
    found = find_origins(build_abstract_model(spec, jnp.float32), files.checkpoint, spec.tensors)
    return {file.name for origin in found.values() for file in origin.tensors}


def named(name: str) -> Header:
    return next(header for header in headers() if header.name == name)


@pytest.mark.parametrize("header", headers(), ids=lambda header: header.name)
def test_a_file_of_llama_cpp_resolves(tmp_path: Path, header: Header) -> None:
    # None is ignored but what llama.cpp wants to be there and does not use.
    assert header.shapes.keys() - UNUSED.get(header.name, set()) <= used(tmp_path, header)


def test_layers_that_draft_are_left_out(tmp_path: Path) -> None:
    """Converters count them, and say how many they are."""
    header = named("mimo_v2_flash")
    count = header.keys["block_count"]
    more = {f"blk.{count + i}.nextn.eh_proj.weight": (64, 128) for i in range(3)}
    drafting = replace(
        header,
        keys={**header.keys, "block_count": count + 3, "nextn_predict_layers": 3},
        shapes={**header.shapes, **more},
    )
    assert header.shapes.keys() <= used(tmp_path, drafting)


def test_norms_of_a_state_space_that_are_not_built(tmp_path: Path) -> None:
    """Falcon-Mamba has them, without weights, and no other name than Mamba."""
    plain, _ = resolve_model(opened(tmp_path, named("mamba")), {})
    files = opened(tmp_path, named("falcon_mamba"))
    _, unread = resolve_model(files, {})
    with pytest.raises(SpecError, match=r"mamba\.ssm\.dt_b_c_rms: True is not followed"):
        check_unused(unread, files.config, plain)


def test_rotated_halves_whose_rows_were_reordered(tmp_path: Path) -> None:
    """Bamba's converter takes the pairs of a whole head, of which the model rotates a part."""
    header = named("granite4_h_tiny")
    half = {"rope.dimension_count": header.keys["rope.dimension_count"] // 2}
    with pytest.raises(SpecError, match="no family is known for granitehybrid"):
        used(tmp_path, replace(header, keys={**header.keys, **half}))


def test_layers_without_sparsity_have_no_threshold(tmp_path: Path) -> None:
    """Gemma 3n's converter writes the quantiles of shares: of none that is minus infinity."""
    spec, _ = resolve_model(opened(tmp_path, named("gemma3n")), {})
    assert spec.decoder is not None
    for layer, share in zip(spec.decoder.layers, (0.9, 0.9, 0.0, 0.0, 0.0), strict=True):
        block = dict(layer.modules)["ffn"]
        assert isinstance(block, GatedMLPSpec)
        wanted = replace(block, threshold=None, sparsity=share).deviations
        assert block.deviations == (wanted if wanted is None else pytest.approx(wanted, 1e-5))
