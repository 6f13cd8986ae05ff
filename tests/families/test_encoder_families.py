"""Encoders built like BERT of which there is no golden, against forward passes in NumPy.

Tensor names and config files are those of published checkpoints; each test computes the results
of two texts, as the family's code or paper says.
"""

from pathlib import Path

import numpy as np
import pytest

from jinfer import LLM
from tests.reference.numpy_blocks import gelu_erf, gelu_tanh
from tests.reference.numpy_positions import Floats
from tests.reference.numpy_tensors import Tensors, centre, dense, layers_of, within

from .bert_line import (
    BERT,
    EPS,
    NAMES,
    bert_layer,
    bert_shapes,
    embedded,
    embedding_shapes,
    masked,
)
from .tiny import (
    HIDDEN,
    INNER,
    TEXTS,
    TYPES,
    VOCAB,
    attend,
    close,
    linear,
    norm,
    served,
)


def electra(t: Tensors, text: list[int], types: list[int]) -> Floats:
    t = within(t, "electra.")
    x = embedded(t, text, types)
    x = dense(x, t, "embeddings_project") if "embeddings_project.weight" in t else x
    for layer in layers_of(t, "encoder.layer."):
        x = bert_layer(x, attend(x, layer, NAMES, causal=False), layer)
    return x


@pytest.mark.parametrize("width", [HIDDEN, 16])
def test_electra_generator(tmp_path: Path, width: int) -> None:
    """Embeddings may be narrower than the layers; here the head is not their table."""
    head = ("generator_predictions.dense", "generator_predictions.LayerNorm")
    shapes = embedding_shapes("electra.", width) | bert_shapes("electra.")
    shapes |= linear(head[0], width, HIDDEN) | norm(head[1], width)
    shapes |= {"generator_lm_head.bias": (VOCAB,), "generator_lm_head.weight": (VOCAB, width)}
    if width != HIDDEN:
        shapes |= linear("electra.embeddings_project", HIDDEN, width)
    config = BERT | {"architectures": ["ElectraForMaskedLM"], "embedding_size": width}
    llm, t = served(tmp_path, config, shapes)
    got = zip(
        llm.hidden(TEXTS, token_type_ids=TYPES),
        llm.logits(TEXTS, token_type_ids=TYPES),
        TEXTS,
        TYPES,
        strict=True,
    )
    for hidden, logits, text, types in got:
        x = electra(t, text, types)
        close(hidden, x)
        close(logits, dense(masked(x, t, head), t, "generator_lm_head"))


def test_electra_discriminator(tmp_path: Path) -> None:
    """One score per token."""
    head = "discriminator_predictions."
    shapes = embedding_shapes("electra.", 16) | bert_shapes("electra.")
    shapes |= linear("electra.embeddings_project", HIDDEN, 16)
    shapes |= linear(head + "dense", HIDDEN, HIDDEN) | linear(head + "dense_prediction", 1, HIDDEN)
    config = BERT | {"architectures": ["ElectraForPreTraining"], "embedding_size": 16}
    llm, t = served(tmp_path, config, shapes)
    for scores, text in zip(llm.logits(TEXTS), TEXTS, strict=True):
        x = electra(t, text, [0] * len(text))
        inner = gelu_erf(dense(x, t, head + "dense"))
        close(scores, dense(inner, t, head + "dense_prediction"))


def test_xlm_roberta(tmp_path: Path) -> None:
    """Positions are counted from after the padding's id on; one type; a head of its own."""
    shapes = embedding_shapes("roberta.", types=1, rows=66) | bert_shapes("roberta.")
    shapes |= linear("lm_head.dense", HIDDEN, HIDDEN) | norm("lm_head.layer_norm")
    shapes |= linear("lm_head.decoder", VOCAB, HIDDEN) | {"lm_head.bias": (VOCAB,)}
    config = BERT | {
        "architectures": ["XLMRobertaForMaskedLM"], "type_vocab_size": 1, "pad_token_id": 1,
        "max_position_embeddings": 66, "layer_norm_eps": 1e-5,
    }  # fmt: skip
    llm, t = served(tmp_path, config, shapes)
    inside = dict(within(t, "roberta."))
    inside["embeddings.position_embeddings.weight"] = inside[
        "embeddings.position_embeddings.weight"
    ][2:]
    for logits, text in zip(llm.logits(TEXTS), TEXTS, strict=True):
        x = embedded(inside, text, [0] * len(text), 1e-5)
        for layer in layers_of(inside, "encoder.layer."):
            x = bert_layer(x, attend(x, layer, NAMES, causal=False), layer, 1e-5)
        out = masked(x, t, ("lm_head.dense", "lm_head.layer_norm"), 1e-5)
        close(logits, out @ t["lm_head.decoder.weight"].T + t["lm_head.bias"])


ALBERT_LAYER = "encoder.albert_layer_groups.0.albert_layers.0."
ALBERT_NAMES = tuple(f"attention.{name}" for name in ("query", "key", "value", "dense"))


def albert(folder: Path) -> tuple[LLM, Tensors]:
    layer = "albert." + ALBERT_LAYER
    shapes = embedding_shapes("albert.", 16)
    shapes |= linear("albert.encoder.embedding_hidden_mapping_in", HIDDEN, 16)
    for name in ALBERT_NAMES:
        shapes |= linear(layer + name, HIDDEN, HIDDEN)
    shapes |= norm(layer + "attention.LayerNorm") | norm(layer + "full_layer_layer_norm")
    shapes |= linear(layer + "ffn", INNER, HIDDEN) | linear(layer + "ffn_output", HIDDEN, INNER)
    shapes |= linear("albert.pooler", HIDDEN, HIDDEN) | linear("predictions.dense", 16, HIDDEN)
    shapes |= norm("predictions.LayerNorm", 16) | {"predictions.bias": (VOCAB,)}
    shapes |= linear("predictions.decoder", VOCAB, 16)
    config = BERT | {
        "architectures": ["AlbertForMaskedLM"], "embedding_size": 16, "hidden_act": "gelu_new",
        "num_hidden_layers": 3, "num_hidden_groups": 1, "inner_group_num": 1,
    }  # fmt: skip
    return served(folder, config, shapes)


def test_albert(tmp_path: Path) -> None:
    """Three layers with the weights of one."""
    llm, t = albert(tmp_path)
    inside = within(t, "albert.")
    layer = within(inside, ALBERT_LAYER)
    names = ("attention.query", "attention.key", "attention.value", "attention.dense")
    pooled = llm.pooled(TEXTS, token_type_ids=TYPES)
    got = llm.logits(TEXTS, token_type_ids=TYPES)
    for logits, first, text, types in zip(got, pooled, TEXTS, TYPES, strict=True):
        x = embedded(inside, text, types)
        x = dense(x, inside, "encoder.embedding_hidden_mapping_in")
        for _ in range(3):
            x = x + attend(x, layer, names, causal=False)
            x = centre(x, layer, "attention.LayerNorm", EPS)
            inner = dense(gelu_tanh(dense(x, layer, "ffn")), layer, "ffn_output")
            x = centre(x + inner, layer, "full_layer_layer_norm", EPS)
        close(first, np.tanh(dense(x[:1], inside, "pooler"))[0])
        out = centre(gelu_tanh(dense(x, t, "predictions.dense")), t, "predictions.LayerNorm", EPS)
        close(logits, out @ t["predictions.decoder.weight"].T + t["predictions.bias"])


def test_shared_weights_are_loaded_once(tmp_path: Path) -> None:
    llm = albert(tmp_path)[0]
    engine = llm._engine
    arrays = dict(zip(engine.runner.model.names, engine.runner.parameters, strict=True))
    for part in ("attn.q.weight", "ffn.up.bias", "ffn_norm.weight"):
        assert len({id(arrays[f"encoder.{i}.{part}"]) for i in range(3)}) == 1
    assert arrays["encoder.0.attn.q.weight"] is not arrays["encoder.0.attn.k.weight"]
