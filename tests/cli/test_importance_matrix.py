"""jinfer.cli.quantize.importance_matrix: what llama.cpp's quantizer is given to weigh errors by."""

import gguf
import numpy as np
import pytest

from jinfer.cli.quantize import importance_matrix
from jinfer.cli.quantize.importance_matrix import importance_matrix as measured


def test_mean_squares_by_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    file = "tests/goldens/gguf_llama2/model.gguf"
    texts = [np.array([[5, 9, 70, 31], [8, 2, 60, 3]], np.int32), np.array([[7]], np.int32)]
    monkeypatch.setattr(importance_matrix, "default_texts", lambda plan, **_: texts)
    found = measured(file)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    values = {
        name: gguf.dequantize(tensor.data, tensor.tensor_type) for name, tensor in tensors.items()
    }
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blk."))
    kinds = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    names = {f"blk.{layer}.{kind}.weight" for layer in range(layers) for kind in kinds}
    assert set(found) - names <= {"output.weight", "token_embd.weight"}
    assert names < set(found)
    for name, squares in found.items():
        assert squares.shape == (values[name].shape[1],)
    # The first layer reads its norm of the embeddings.
    rows = values["token_embd.weight"][np.concatenate([ids.reshape(-1) for ids in texts])]
    rows /= np.sqrt(np.mean(np.square(rows), axis=1, keepdims=True) + 1e-5)
    expected = np.mean(np.square(rows * values["blk.0.attn_norm.weight"]), axis=0)
    for kind in ("attn_q", "attn_k", "attn_v"):
        np.testing.assert_allclose(found[f"blk.0.{kind}.weight"], expected, rtol=1e-4)
