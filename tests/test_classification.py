"""Classification heads: against transformers' scores, and other forms of heads in NumPy."""

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scipy.special import erf

from jinfer import LLM, AsyncLLM, RequestError
from tests.families.bert_line import BERT, NAMES, bert_shapes, embedding_shapes
from tests.families.tiny import (
    HIDDEN,
    INNER,
    TEXTS,
    VOCAB,
    Shapes,
    close,
    linear,
    norm,
    random_tensors,
    served,
)

GOLDENS = Path(__file__).parent / "goldens"
TOLERANCE = 2e-4
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]

type Floats = np.ndarray
type Tensors = Mapping[str, np.ndarray]


def asked(name: str) -> list[list[int]]:
    """The prompts of a golden, without padding: the short ones, then the long one."""
    with np.load(GOLDENS / name / "expected.npz") as values:
        mask = values["attention_mask"].astype(bool)
        texts = [row[m].tolist() for row, m in zip(values["input_ids"], mask, strict=True)]
        return [*texts, values["long_input_ids"][0].tolist()]


@pytest.mark.parametrize("name", ["bert_cls", "qwen3_cls"])
@pytest.mark.parametrize("config", ["config.json", "config.v5.json"])
def test_goldens(name: str, config: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(GOLDENS / name, folder)
    if config != "config.json":
        shutil.copy(folder / config, folder / "config.json")
    with np.load(folder / "expected.npz") as values:
        wanted = np.concatenate([values["scores"], values["long_scores"]])
    llm = LLM(folder, dtype="float32")
    got = llm.classify(asked(name))
    np.testing.assert_allclose(got.scores, wanted, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(got.probabilities, 1 / (1 + np.exp(-wanted)), rtol=0, atol=1e-4)
    assert (got.labels, got.best) == (("LABEL_0",), ["LABEL_0"] * 3)
    alone = [llm.classify([ids]).scores[0] for ids in asked(name)]
    np.testing.assert_allclose(got.scores, alone, rtol=0, atol=1e-6)
    with pytest.raises(RequestError, match=r"no (decoder|vocabulary head).*; use .*classify"):
        llm.generate(asked(name))


@pytest.mark.parametrize("name", ["bert_cls", "qwen3_cls"])
def test_bits(name: str, optimized: None) -> None:
    """A text has the same scores alone and in any company."""
    llm = LLM(GOLDENS / name, dtype="float32")
    texts = asked(name)
    alone = [llm.classify([ids]).scores[0] for ids in texts]
    np.testing.assert_array_equal(llm.classify(texts).scores, alone)


def dense(x: Floats, t: Tensors, name: str) -> Floats:
    return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0)


def gelu(x: Floats) -> Floats:
    return x * (1 + erf(x / np.sqrt(2))) / 2


def modernbert(h: Floats, t: Tensors) -> Floats:
    x = gelu(dense(h.mean(axis=0), t, "head.dense"))
    x = (x - x.mean()) / np.sqrt(x.var() + 1e-5) * t["head.norm.weight"]
    return dense(x, t, "classifier")


@dataclass(frozen=True)
class Form:
    """A head on the layers of a golden.

    Attributes:
        golden: the checkpoint whose layers it takes.
        architecture: what config.json calls it.
        drop: beginnings of the tensors that such a checkpoint does not have.
        head: the head's matrices, [outputs, inputs]; with a bias unless called score.
        score: the head in NumPy, of the last hidden states of a text.
        config: further keys.
    """

    golden: str
    architecture: str
    drop: tuple[str, ...]
    head: dict[str, tuple[int, int]]
    score: Callable[[Floats, Tensors], Floats]
    config: dict[str, Any]


def last(h: Floats, t: Tensors) -> Floats:
    return dense(h[-1], t, "score")


def roberta(h: Floats, t: Tensors) -> Floats:
    return dense(np.tanh(dense(h[0], t, "classifier.dense")), t, "classifier.out_proj")


TWO_LAYERS = {"classifier.dense": (64, 64), "classifier.out_proj": (3, 64)}
EURO = {"dense": (64, 64), "classifier": (3, 64)}
FORMS = [
    Form(
        "bert", "BertForSequenceClassification", ("cls.",), {"classifier": (3, 64)},
        lambda h, t: dense(np.tanh(dense(h[0], t, "bert.pooler.dense")), t, "classifier"), {},
    ),
    Form("roberta", "RobertaForSequenceClassification", ("lm_head.",), TWO_LAYERS, roberta, {}),
    Form("roberta", "XLMRobertaForSequenceClassification", ("lm_head.",), TWO_LAYERS, roberta, {}),
    Form("mpnet", "MPNetForSequenceClassification", ("lm_head.",), TWO_LAYERS, roberta, {}),
    Form(
        "distilbert", "DistilBertForSequenceClassification", ("vocab_",),
        {"pre_classifier": (64, 64), "classifier": (3, 64)},
        lambda h, t: dense(np.maximum(dense(h[0], t, "pre_classifier"), 0), t, "classifier"), {},
    ),
    Form(
        "probe_modernbert_rope", "ModernBertForSequenceClassification", ("decoder.",),
        {"classifier": (3, 64)}, modernbert, {"classifier_pooling": "mean"},
    ),
    Form(
        "roformer", "RoFormerForSequenceClassification", ("cls.",), TWO_LAYERS,
        lambda h, t: dense(gelu(dense(h[0], t, "classifier.dense")), t, "classifier.out_proj"), {},
    ),
    Form(
        "eurobert", "EuroBertForSequenceClassification", ("lm_head",), EURO,
        lambda h, t: dense(gelu(dense(h, t, "dense")), t, "classifier").mean(axis=0),
        {"classifier_pooling": "late"},
    ),
    Form(
        "eurobert", "EuroBertForSequenceClassification", ("lm_head",), EURO,
        lambda h, t: dense(gelu(dense(h.mean(axis=0), t, "dense")), t, "classifier"),
        {"classifier_pooling": "mean"},
    ),
    Form("llama2", "LlamaForSequenceClassification", ("lm_head",), {"score": (3, 64)}, last, {}),
    Form("mistral", "MistralForSequenceClassification", ("lm_head",), {"score": (3, 64)}, last, {}),
    Form("qwen15", "Qwen2ForSequenceClassification", ("lm_head",), {"score": (3, 64)}, last, {}),
    Form("gemma2", "Gemma2ForSequenceClassification", ("lm_head",), {"score": (3, 48)}, last, {}),
    Form("gpt2", "GPT2ForSequenceClassification", ("lm_head",), {"score": (3, 64)}, last, {}),
]  # fmt: skip


def with_head(form: Form, folder: Path, **config: Any) -> Tensors:
    """Writes a checkpoint of that form; its tensors."""
    source = GOLDENS / form.golden
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= {
            name: values
            for name, values in load_file(file).items()
            if not name.startswith(form.drop)
        }
    shapes: dict[str, tuple[int, ...]] = {f"{n}.weight": size for n, size in form.head.items()}
    shapes |= {f"{n}.bias": size[:1] for n, size in form.head.items() if n != "score"}
    tensors |= random_tensors(shapes)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    told = json.loads((source / "config.json").read_text()) | form.config
    labels = {"id2label": {"0": "bad", "1": "so so", "2": "good"}}
    told |= {"architectures": [form.architecture], **labels, **config}
    (folder / "config.json").write_text(json.dumps(told))
    return tensors


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.architecture)
def test_heads(form: Form, tmp_path: Path) -> None:
    tensors = with_head(form, tmp_path / "model")
    llm = LLM(tmp_path / "model", dtype="float32")
    texts = asked(form.golden)[:2]
    got = llm.classify(texts)
    wanted = np.stack([form.score(h, tensors) for h in llm.hidden(texts)])
    assert wanted.std() > 0.1
    np.testing.assert_allclose(got.scores, wanted, rtol=0, atol=TOLERANCE)
    assert got.labels == ("bad", "so so", "good")
    assert got.best == [got.labels[i] for i in wanted.argmax(axis=1)]
    np.testing.assert_allclose(got.probabilities.sum(axis=1), 1, atol=1e-5)


def bert_like(prefix: str, head: tuple[str, str], names: tuple[str, ...] = NAMES) -> Shapes:
    """The shapes of a BERT whose head has two layers of these names."""
    shapes = embedding_shapes(prefix) | bert_shapes(prefix, names)
    return shapes | linear(head[0], HIDDEN, HIDDEN) | linear(head[1], 3, HIDDEN)


def gte_shapes() -> Shapes:
    shapes = embedding_shapes("new.")
    del shapes["new.embeddings.position_embeddings.weight"]
    for i in range(2):
        layer = f"new.encoder.layer.{i}."
        shapes |= linear(layer + "attention.qkv_proj", 3 * HIDDEN, HIDDEN)
        shapes |= linear(layer + "attention.o_proj", HIDDEN, HIDDEN)
        shapes |= linear(layer + "mlp.up_gate_proj", 2 * INNER, HIDDEN, False)
        shapes |= linear(layer + "mlp.down_proj", HIDDEN, INNER)
        shapes |= norm(layer + "attn_ln") | norm(layer + "mlp_ln")
    return shapes | linear("new.pooler.dense", HIDDEN, HIDDEN) | linear("classifier", 3, HIDDEN)


def nvidia_shapes() -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "score.weight": (3, HIDDEN)}
    for i in range(2):
        layer = f"model.layers.{i}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes |= linear(f"{layer}self_attn.{name}", HIDDEN, HIDDEN, False)
        shapes |= linear(layer + "mlp.gate_proj", INNER, HIDDEN, False)
        shapes |= linear(layer + "mlp.up_proj", INNER, HIDDEN, False)
        shapes |= linear(layer + "mlp.down_proj", HIDDEN, INNER, False)
        shapes |= {f"{layer}{n}_layernorm.weight": (HIDDEN,) for n in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (HIDDEN,)}


DEBERTA: dict[str, Any] = {
    "position_buckets": 8, "share_att_key": True, "relative_attention": True, "norm_rel_ebd":
    "layer_norm", "pos_att_type": "p2c|c2p", "max_relative_positions": 24, "type_vocab_size": 2,
    "pooler_hidden_act": "gelu",
}  # fmt: skip
DEBERTA_NAMES = (*(f"attention.self.{n}_proj" for n in ("query", "key", "value")), NAMES[3])
OTHERS: dict[str, tuple[dict[str, Any], Shapes, Callable[[Floats, Tensors], Floats]]] = {
    "ElectraForSequenceClassification": (
        {}, bert_like("electra.", ("classifier.dense", "classifier.out_proj")),
        lambda h, t: dense(gelu(dense(h[0], t, "classifier.dense")), t, "classifier.out_proj"),
    ),
    "DebertaV2ForSequenceClassification": (
        DEBERTA,
        bert_like("deberta.", ("pooler.dense", "classifier"), DEBERTA_NAMES)
        | {"deberta.encoder.rel_embeddings.weight": (16, HIDDEN)}
        | norm("deberta.encoder.LayerNorm"),
        lambda h, t: dense(gelu(dense(h[0], t, "pooler.dense")), t, "classifier"),
    ),
    "NewForSequenceClassification": (
        {"position_embedding_type": "rope", "rope_theta": 2000.0}, gte_shapes(),
        lambda h, t: dense(np.tanh(dense(h[0], t, "new.pooler.dense")), t, "classifier"),
    ),
    "LlamaBidirectionalForSequenceClassification": (
        {"pooling": "avg", "temperature": 0.5, "hidden_act": "silu", "layer_norm_eps": None},
        nvidia_shapes(), lambda h, t: dense(h.mean(axis=0), t, "score") / 0.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("architecture", OTHERS)
def test_heads_of_made_up_checkpoints(architecture: str, tmp_path: Path) -> None:
    config, shapes, score = OTHERS[architecture]
    keys = BERT | {"architectures": [architecture]} | config
    keys = {name: value for name, value in keys.items() if value is not None}
    llm, tensors = served(tmp_path, keys, shapes)
    wanted = np.stack([score(h, tensors) for h in llm.hidden(TEXTS)])
    close(llm.classify(TEXTS).scores, wanted)


def with_words(folder: Path) -> None:
    """Writes a WordPiece vocabulary of letters."""
    vocabulary = [*WORDS, *(f"word{i}" for i in range(256 - len(WORDS)))]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")


def test_pairs_and_their_types(tmp_path: Path) -> None:
    """A pair is read as [CLS] a [SEP] b [SEP], with a type for each text."""
    folder = tmp_path / "model"
    with_head(FORMS[0], folder)
    with_words(folder)
    llm = LLM(folder, dtype="float32")
    cls, sep, a, b = (WORDS.index(word) for word in ("[CLS]", "[SEP]", "a", "b"))
    ids, types = [cls, a, a, sep, b, sep], [0, 0, 0, 0, 1, 1]
    pooled = llm.pooled([ids], token_type_ids=[types])
    tensors = load_file(folder / "model.safetensors")
    wanted = dense(pooled, tensors, "classifier")
    got = llm.classify([("a a", "b")])
    np.testing.assert_allclose(got.scores, wanted, rtol=0, atol=TOLERANCE)
    both: Any = ["a", ("a a", "b")]
    other = asyncio.run(AsyncLLM(llm).classify(both))
    np.testing.assert_allclose(other.scores[1:], got.scores, rtol=0, atol=1e-6)
    long = llm.classify([("a", "b " * 1000)])  # the document's end is cut off
    short = llm.classify([("a", "b " * (llm.context - 4))])
    np.testing.assert_array_equal(long.scores, short.scores)


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"problem_type": "multi_label_classification"}, lambda x: 1 / (1 + np.exp(-x))),
        ({"problem_type": "regression"}, lambda x: x),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, lambda x: x),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
            lambda x: 1 / (1 + np.exp(-x)),
        ),
    ],
)
def test_activations(
    config: dict[str, Any], activation: Callable[[Floats], Floats], tmp_path: Path
) -> None:
    with_head(FORMS[0], tmp_path / "model", **config)
    got = LLM(tmp_path / "model", dtype="float32").classify([[2, 5, 6, 3]])
    np.testing.assert_allclose(got.probabilities, activation(got.scores), rtol=1e-5)


def test_what_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with_head(FORMS[0], folder, problem_type="odd")
    with pytest.raises(ValueError, match=r"config.json: problem_type is 'odd'; .*regression"):
        LLM(folder)
    with_head(FORMS[0], tmp_path / "b")
    settings: dict[str, Any] = {"classification.labels": ["one"]}
    with pytest.raises(ValueError, match=r"classification.labels: has 1 names for 3 classes"):
        LLM(tmp_path / "b", **settings)
    pair: dict[str, Any] = {"classification.pair": "{query}"}
    with pytest.raises(ValueError, match=r"has {document} 0 times"):
        LLM(tmp_path / "b", **pair)
    llm = LLM(GOLDENS / "bert", dtype="float32")
    with pytest.raises(RequestError, match="no head that gives classes"):
        llm.classify([[1, 2]])
    with pytest.raises(ValueError, match=r"classification: is for a model with a head"):
        LLM(GOLDENS / "bert", **settings)
