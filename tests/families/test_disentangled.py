"""DeBERTa's attention (arXiv 2006.03654), against the paper's formulas in NumPy, pair by pair."""

import math
from pathlib import Path

import numpy as np
import pytest

from jinfer.modelspec.position_blocks import DisentangledSpec
from jinfer.nn.attention_features import distance_buckets
from tests.reference.numpy_blocks import softmax
from tests.reference.numpy_positions import Floats
from tests.reference.numpy_tensors import Tensors, centre, dense, heads, layers_of, merged, within

from .bert_line import BERT, SELF, bert_layer, bert_shapes, embedded, embedding_shapes
from .tiny import DIM, HEADS, HIDDEN, TEXTS, TYPES, VOCAB, close, linear, norm, served

EPS = 1e-7
BUCKETS, FARTHEST = 8, 24
NAMES = (SELF + "query_proj", SELF + "key_proj", SELF + "value_proj", "attention.output.dense")


def row(distance: int, buckets: int, farthest: int) -> int:
    """The row of a distance: v2 keeps the nearer half of the buckets exact."""
    half, far = buckets // 2, abs(distance)
    if far > half:
        share = math.log(far / half) / math.log((farthest - 1) / half)
        far = math.ceil(share * (half - 1) - 1e-9) + half
    return min(max(int(math.copysign(far, distance)) + buckets, 0), 2 * buckets - 1)


@pytest.mark.parametrize(("buckets", "farthest"), [(8, 24), (256, 512), (2, 9)])
def test_rows_of_distances(buckets: int, farthest: int) -> None:
    block = DisentangledSpec(kind="disentangled", buckets=buckets, max_distance=farthest)
    wanted = [row(distance, buckets, farthest) for distance in range(-farthest, farthest + 1)]
    assert distance_buckets(block).tolist() == wanted


def disentangled(x: Floats, t: Tensors, table: Floats) -> Floats:
    """Content to content, content to position and position to content, over sqrt(3 d)."""
    q, k, v = (heads(dense(x, t, name), HEADS) for name in NAMES[:3])
    to_q, to_k = (heads(dense(table, t, name), HEADS) for name in NAMES[:2])
    scores = np.zeros((HEADS, len(x), len(x)))
    for i in range(len(x)):
        for j in range(len(x)):
            r = row(i - j, BUCKETS, FARTHEST)
            pairs = q[i] * k[j] + q[i] * to_k[r] + k[j] * to_q[r]
            scores[:, i, j] = pairs.sum(axis=-1) / math.sqrt(3 * DIM)
    out = np.einsum("hqk,khd->qhd", softmax(scores), v)
    return dense(merged(out), t, NAMES[3])


@pytest.mark.parametrize("version", [2, 3])
def test_deberta(tmp_path: Path, version: int) -> None:
    """v3 has no positions and types in its stem, and heads that are not used."""
    shapes = embedding_shapes("deberta.") | bert_shapes("deberta.", NAMES)
    shapes |= {"deberta.encoder.rel_embeddings.weight": (2 * BUCKETS, HIDDEN)}
    shapes |= norm("deberta.encoder.LayerNorm")
    config = BERT | {
        "layer_norm_eps": EPS, "position_buckets": BUCKETS, "share_att_key": True,
        "relative_attention": True, "norm_rel_ebd": "layer_norm", "pos_att_type": "p2c|c2p",
        "max_position_embeddings": 64, "max_relative_positions": FARTHEST,
    }  # fmt: skip
    if version == 3:
        del shapes["deberta.embeddings.token_type_embeddings.weight"]
        shapes |= linear("mask_predictions.dense", HIDDEN, HIDDEN)
        shapes |= {"lm_predictions.lm_head.bias": (VOCAB,)}
        config |= {"position_biased_input": False, "type_vocab_size": 0}
    llm, t = served(tmp_path, config | {"architectures": ["DebertaV2Model"]}, shapes)
    t = within(t, "deberta.")
    table = centre(t["encoder.rel_embeddings.weight"], t, "encoder.LayerNorm", EPS)
    got = llm.hidden(TEXTS, token_type_ids=TYPES if version == 2 else None)
    for hidden, text, types in zip(got, TEXTS, TYPES, strict=True):
        if version == 2:
            x = embedded(t, text, types, EPS)
        else:
            x = centre(t["embeddings.word_embeddings.weight"][text], t, "embeddings.LayerNorm", EPS)
        for layer in layers_of(t, "encoder.layer."):
            x = bert_layer(x, disentangled(x, layer, table), layer, EPS)
        close(hidden, x)
