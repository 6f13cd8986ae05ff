"""GGUF files of every architecture: the family is found, and every name and shape has its place."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.nn.abstract_model import build_abstract_model
from jinfer.opening.open_model import open_files
from jinfer.opening.resolve_model import family_of, resolve_model
from jinfer.opening.unused_config import check_followed
from jinfer.weights.tensor_mapping import find_origins

from .gguf_files import write_gguf
from .gguf_headers import Header, headers


@pytest.mark.parametrize("header", headers(), ids=lambda header: header.name)
def test_a_file_of_llama_cpp_resolves(tmp_path: Path, header: Header) -> None:
    tensors = {name: np.zeros(shape, np.float32) for name, shape in header.shapes.items()}
    write_gguf(tmp_path / "m.gguf", header.architecture, header.keys, tensors)
    files = open_files(str(tmp_path / "m.gguf"), {})
    assert Path(family_of(files)).stem == header.family
    spec, unread = resolve_model(files, {})
    check_followed(unread, files.config, spec)
    found = find_origins(build_abstract_model(spec, jnp.float32), files.checkpoint, spec.tensors)
    used = {file.name for origin in found.values() for file in origin.files}
    assert header.shapes.keys() <= used  # none of them is ignored
