"""Rankers: GGUF's rank pooling, and language models that answer with one of two tokens."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

from jinfer import LLM
from tests.families.tiny import random_tensors
from tests.test_classification import GOLDENS, TOLERANCE, asked, dense

type Tensors = Mapping[str, np.ndarray]


def test_two_tokens_as_classes(tmp_path: Path) -> None:
    """A language model whose answer is one of two tokens, and a text that a pair becomes."""
    spec = tmp_path / "model.toml"
    spec.write_text(f"""
family = "qwen3"
weights = "{GOLDENS / "qwen3"}"
dtype = "float32"

[decoder]
classes = "pick(logits(norm(x)))"

[decoder.modules]
pick = {{ kind = "select", indices = [40, 7] }}

[classification]
labels = ["yes", "no"]
relevance = 0
pair = "Q: {{query}} D: {{document}} A:"
""")
    llm = LLM(spec)
    texts = asked("qwen3")
    logits = np.stack(llm.logits(texts, last=True))[:, [40, 7]]
    got = llm.classify(texts)
    np.testing.assert_allclose(got.scores, logits, rtol=0, atol=1e-5)
    yes = 1 / (1 + np.exp(logits[:, 1] - logits[:, 0]))
    np.testing.assert_allclose(got.probabilities[:, 0], yes, rtol=1e-4)
    assert llm.generate(texts[:1], max_tokens=2)[0].token_ids  # it goes on writing, too


def ranker(folder: str, path: Path, tensors: Tensors, **texts: str) -> LLM:
    """A golden's GGUF with rank pooling and a head, as llama.cpp's converter writes one."""
    source = gguf.GGUFReader(GOLDENS / folder / "model.gguf")
    named = source.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, named)
    for name, each in source.fields.items():
        if not name.startswith("GGUF.") and not name.endswith((".architecture", "pooling_type")):
            kind, *of = each.types
            value = each.contents()
            if name == "tokenizer.ggml.tokens" and named == "qwen3":
                value[100:195] = ["Ġ", *map(chr, range(33, 127))]
            writer.add_key_value(name, value, kind, of[-1] if of else None)
    writer.add_uint32(f"{named}.pooling_type", 4)
    for name, text in texts.items():
        writer.add_string(name.replace("__", "."), text)
    writer.add_array(f"{named}.classifier.output_labels", ["yes", "no"])
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return LLM(path, dtype="float32")


def test_a_gguf_encoder_that_ranks(tmp_path: Path) -> None:
    shapes = {"cls.weight": (48, 48), "cls.bias": (48,), "cls.output.weight": (2, 48)}
    tensors = random_tensors({**shapes, "cls.output.bias": (2,)})
    llm = ranker("gguf_minilm", tmp_path / "model.gguf", tensors)
    texts = asked("minilm")[:2]
    pooled = [np.tanh(dense(h[0], tensors, "cls")) for h in llm.hidden(texts)]
    wanted = dense(np.stack(pooled), tensors, "cls.output")
    got = llm.classify(texts)
    np.testing.assert_allclose(got.scores, wanted, rtol=0, atol=TOLERANCE)
    assert got.labels == ("yes", "no")


def test_a_gguf_decoder_that_ranks(tmp_path: Path) -> None:
    """Qwen3-Reranker as llama.cpp converts it: rows of its vocabulary head, and a prompt."""
    tensors = random_tensors({"cls.output.weight": (2, 64)})
    prompt = "Q: {query} D: {document}"
    keys = {"tokenizer__chat_template__rerank": prompt}
    llm = ranker("gguf_qwen3", tmp_path / "model.gguf", tensors, **keys)
    ids = llm.encode("Q: who D: a bird")
    wanted = dense(llm.hidden([ids])[0][-1:], tensors, "cls.output")
    got = llm.classify([("who", "a bird")])
    np.testing.assert_allclose(got.scores, wanted, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(got.probabilities.sum(axis=1), 1, atol=1e-6)
    assert llm.session.opened.classification is not None
    assert llm.session.opened.classification.relevance == 0
