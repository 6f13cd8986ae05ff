"""Vectors of texts are those that sentence-transformers gives for the same folders."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jinfer import LLM
from jinfer.api.text_embeddings import SIMILARITIES

GOLDENS = Path(__file__).parents[1] / "goldens"
FOLDER = GOLDENS / "sentence_transformers"
TEXTS = json.loads((FOLDER / "texts.json").read_text())
# Every pooling at once and a dense layer; later tokens for more, in small letters; the last token,
# with prompts; an encoder with a default prompt that does not count, and a length of 1 too early.
CASES = {
    "dec_multi": "qwen3_embedding",
    "dec_weighted_lower": "qwen3_embedding",
    "dec_last_norm": "qwen3_embedding",
    "enc_prompt": "minilm",
}


@pytest.mark.parametrize("name", CASES)
def test_vectors(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    shutil.copytree(FOLDER / name, folder)
    for file in ("config.json", "model.safetensors"):
        shutil.copy(GOLDENS / CASES[name] / file, folder / file)
    llm = LLM(folder, dtype="float32")
    with np.load(FOLDER / "expected.npz") as arrays:
        expected = {key: arrays[key] for key in arrays.files if key.split(".")[0] == name}
    similarities = expected.pop(f"{name}.sim", None)
    for key, wanted in expected.items():
        got = llm.embed(TEXTS, prompt_name=key.partition(".")[2] or None)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)
    if similarities is not None:
        query = np.repeat(llm.embed(TEXTS[:1], prompt_name="query"), len(TEXTS), axis=0)
        near = SIMILARITIES[llm.session.opened.pooling.similarity]
        got = near(query, llm.embed(TEXTS, prompt_name="document"))
        np.testing.assert_allclose(got, similarities[0], rtol=0, atol=2e-5)
