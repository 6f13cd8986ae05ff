"""What sentence-transformers' files beside the weights say of an embedding."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfer import LLM
from jinfer.opening.sources import SourceError

GOLDEN = Path(__file__).parents[1] / "goldens" / "minilm"
TEXTS = [[5, 6, 7, 8], [9] * 11]
MODULE = "sentence_transformers.models."


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def model(folder: Path, *modules: str) -> Path:
    """The golden's files, with these modules after the transformer."""
    for file in GOLDEN.iterdir():
        shutil.copy(file, folder / file.name)
    listed = [{"idx": 0, "name": "0", "path": "", "type": MODULE + "Transformer"}]
    for index, kind in enumerate(modules, 1):
        path = f"{index}_{kind}"
        listed.append({"idx": index, "name": str(index), "path": path, "type": MODULE + kind})
    write(folder / "modules.json", listed)
    return folder


def pooling(folder: Path, mode: str) -> None:
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    write(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": 48} | {f"pooling_mode_{name}": name == mode for name in modes},
    )


def dense(folder: Path, outputs: int, inputs: int, function: str, bias: bool) -> dict[str, Any]:
    """Writes a dense layer and returns its tensors."""
    rng = np.random.default_rng(outputs)
    tensors = {"linear.weight": rng.normal(0, 0.2, (outputs, inputs)).astype(np.float32)}
    if bias:
        tensors["linear.bias"] = rng.normal(0, 0.2, outputs).astype(np.float32)
    config = {"in_features": inputs, "out_features": outputs, "bias": bias}
    write(folder / "config.json", config | {"activation_function": function})
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_dense_layers_follow_the_pooling(tmp_path: Path) -> None:
    folder = model(tmp_path, "Pooling", "Dense", "Dense", "Normalize")
    pooling(folder, "cls_token")
    first = dense(folder / "2_Dense", 64, 48, "torch.nn.modules.activation.Tanh", True)
    second = dense(folder / "3_Dense", 20, 64, "torch.nn.modules.linear.Identity", False)
    llm = LLM(folder, dtype="float32")
    x = np.stack([hidden[0] for hidden in llm.hidden(TEXTS)])
    x = np.tanh(x @ first["linear.weight"].T + first["linear.bias"]) @ second["linear.weight"].T
    np.testing.assert_allclose(llm.embed(TEXTS, normalize=False), x, rtol=0, atol=1e-5)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(llm.embed(TEXTS), x, rtol=0, atol=1e-5)


def test_the_pooling_is_the_checkpoints(tmp_path: Path) -> None:
    """The last token's vector, which is not brought to length 1 without Normalize."""
    folder = model(tmp_path, "Pooling")
    pooling(folder, "lasttoken")
    llm = LLM(folder, dtype="float32")
    last = np.stack([hidden[-1] for hidden in llm.hidden(TEXTS)])
    np.testing.assert_allclose(llm.embed(TEXTS), last, rtol=0, atol=1e-6)


def test_texts_are_cut_to_the_length_it_was_trained_on(tmp_path: Path) -> None:
    """The last token, which ends a text, stays."""
    folder = model(tmp_path, "Pooling", "Normalize")
    pooling(folder, "mean_tokens")
    write(folder / "sentence_bert_config.json", {"max_seq_length": 4})
    llm = LLM(folder, dtype="float32")
    np.testing.assert_array_equal(llm.embed([[5, 6, 7, 8, 9, 10]]), llm.embed([[5, 6, 7, 10]]))


@pytest.mark.parametrize(
    ("mode", "kind", "function", "error"),
    [
        ("max_tokens", "Dense", "Identity", "the pooling pooling_mode_max_tokens is not known"),
        ("cls_token", "CNN", "Identity", "a module of kind 'CNN' is not known"),
        ("cls_token", "Dense", "torch.nn.ELU", "the activation_function torch.nn.ELU is not known"),
    ],
)
def test_what_is_not_known(tmp_path: Path, mode: str, kind: str, function: str, error: str) -> None:
    folder = model(tmp_path, "Pooling", kind)
    pooling(folder, mode)
    dense(folder / f"2_{kind}", 8, 48, function, False)
    with pytest.raises(SourceError, match=error):
        LLM(folder)


@pytest.mark.parametrize("path", ["../outside", "/etc", "1_Pooling/../../outside", "nul\0"])
def test_modules_stay_in_the_folder(tmp_path: Path, path: str) -> None:
    folder = model(tmp_path, "Pooling", "Normalize")
    listed = json.loads((folder / "modules.json").read_text())
    listed[1]["path"] = path
    write(folder / "modules.json", listed)
    with pytest.raises(SourceError, match=r"modules\.json: .* leads out of the folder"):
        LLM(folder)


@pytest.mark.parametrize("shape", [(7, 3), (0, 32), (32,)])
def test_a_dense_layer_of_another_width(tmp_path: Path, shape: tuple[int, ...]) -> None:
    folder = model(tmp_path, "Dense")
    write(folder / "1_Dense" / "config.json", {"activation_function": "torch.nn.Identity"})
    save_file(
        {"linear.weight": np.zeros(shape, np.float32)}, folder / "1_Dense" / "model.safetensors"
    )
    with pytest.raises(SourceError, match=r"linear\.weight \["):
        LLM(folder)
