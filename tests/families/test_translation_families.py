"""Encoder-decoders of which there is no golden, against forward passes in NumPy.

Tensor names and config files are those of published checkpoints. The logits of two answers are
compared, each of which its decoder gives over a text of its own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import SamplingParams
from jinfer.sampling.samplers import Strategy
from tests.reference.numpy_blocks import (
    attention,
    gelu_erf,
    gelu_tanh,
    relu,
    rms_norm,
    silu,
    softmax,
)
from tests.reference.numpy_positions import Floats, sinusoids_marian
from tests.reference.numpy_tensors import Tensors, centre, dense, heads, layers_of, merged

from .tiny import (
    DIM,
    HEADS,
    HIDDEN,
    INNER,
    TEXTS,
    VOCAB,
    Shapes,
    attend,
    close,
    linear,
    norm,
    served,
)

ANSWERS = [text[3:20:2] for text in TEXTS]
BART = {
    "vocab_size": VOCAB, "d_model": HIDDEN, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": INNER,
    "decoder_ffn_dim": INNER, "max_position_embeddings": 64, "scale_embedding": True,
    "is_encoder_decoder": True, "decoder_start_token_id": 2, "pad_token_id": 1,
    "tie_word_embeddings": True,
}  # fmt: skip
PARTS = ("q_proj", "k_proj", "v_proj", "out_proj")
type Activation = Callable[[Floats], Floats]


def bart_shapes(ends: bool = False, embedding: bool = False) -> Shapes:
    """The names of the BART line.

    Args:
        ends: either side has a norm at its end.
        embedding: either side has a table of positions and a norm after the embeddings.
    """
    shapes: Shapes = {"model.shared.weight": (VOCAB, HIDDEN), "final_logits_bias": (1, VOCAB)}
    for side, attentions in (
        ("encoder", ("self_attn",)),
        ("decoder", ("self_attn", "encoder_attn")),
    ):
        shapes[f"model.{side}.embed_tokens.weight"] = (VOCAB, HIDDEN)
        if embedding:
            shapes[f"model.{side}.embed_positions.weight"] = (66, HIDDEN)
            shapes |= norm(f"model.{side}.layernorm_embedding")
        shapes |= norm(f"model.{side}.layer_norm") if ends else {}
        for i in range(2):
            layer = f"model.{side}.layers.{i}."
            for name in attentions:
                shapes |= norm(f"{layer}{name}_layer_norm")
                for part in PARTS:
                    shapes |= linear(f"{layer}{name}.{part}", HIDDEN, HIDDEN)
            shapes |= norm(layer + "final_layer_norm")
            shapes |= linear(layer + "fc1", INNER, HIDDEN) | linear(layer + "fc2", HIDDEN, INNER)
    return shapes


def bart_side(
    x: Floats, t: Tensors, side: str, act: Activation, before: bool, encoded: Floats | None = None
) -> Floats:
    """The layers of a side, with the norms before their branches or after the sums."""

    def branch(x: Floats, layer: Tensors, name: str, f: Activation) -> Floats:
        return x + f(centre(x, layer, name)) if before else centre(x + f(x), layer, name)

    def attended(layer: Tensors, name: str, **how: Any) -> Activation:
        q, k, v, o = (f"{name}.{part}" for part in PARTS)
        return lambda n: attend(n, layer, (q, k, v, o), **how)

    def fed(layer: Tensors) -> Activation:
        return lambda n: dense(act(dense(n, layer, "fc1")), layer, "fc2")

    for layer in layers_of(t, f"model.{side}.layers."):
        own = attended(layer, "self_attn", causal=encoded is not None)
        x = branch(x, layer, "self_attn_layer_norm", own)
        if encoded is not None:
            cross = attended(layer, "encoder_attn", over=encoded, causal=False)
            x = branch(x, layer, "encoder_attn_layer_norm", cross)
        x = branch(x, layer, "final_layer_norm", fed(layer))
    return centre(x, t, f"model.{side}.layer_norm") if before else x


def check_bart(
    folder: Path,
    architecture: str,
    activation: tuple[str, Activation],
    shapes: Shapes,
    embed: Callable[[Tensors, str, list[int]], Floats],
    before: bool,
) -> None:
    config = BART | {"architectures": [architecture], "activation_function": activation[0]}
    llm, t = served(folder, config, shapes)
    got = llm.logits(ANSWERS, encoder_ids=TEXTS)
    for logits, text, answer in zip(got, TEXTS, ANSWERS, strict=True):
        encoded = bart_side(embed(t, "encoder", text), t, "encoder", activation[1], before)
        x = embed(t, "decoder", answer)
        x = bart_side(x, t, "decoder", activation[1], before, encoded)
        close(logits, x @ t["model.shared.weight"].T + t["final_logits_bias"])


def with_sinusoids(t: Tensors, side: str, text: list[int]) -> Floats:
    words = np.sqrt(HIDDEN) * t["model.shared.weight"][text]
    return words + sinusoids_marian(np.arange(len(text)), HIDDEN)


@pytest.mark.parametrize("stored", [False, True])
def test_marian(tmp_path: Path, stored: bool) -> None:
    """Norms after the sums, swish; positions that a file stores count before the sinusoids."""
    shapes = bart_shapes()
    if stored:
        shapes |= {
            f"model.{s}.embed_positions.weight": (64, HIDDEN) for s in ("encoder", "decoder")
        }

    def embed(t: Tensors, side: str, text: list[int]) -> Floats:
        if not stored:
            return with_sinusoids(t, side, text)
        words = np.sqrt(HIDDEN) * t["model.shared.weight"][text]
        return words + t[f"model.{side}.embed_positions.weight"][: len(text)]

    check_bart(tmp_path, "MarianMTModel", ("swish", silu), shapes, embed, before=False)


@pytest.mark.parametrize("strategy", ["greedy", "beam"])
def test_marian_never_chooses_the_padding(tmp_path: Path, strategy: Strategy) -> None:
    """Though its logit is the greatest here; the logits that are asked for stay as they are."""
    config = BART | {"architectures": ["MarianMTModel"], "activation_function": "swish"}
    shapes = bart_shapes()
    llm, _ = served(tmp_path, config, shapes, {"final_logits_bias": np.eye(1, VOCAB, 1) * 50})
    assert llm.logits([[2]], encoder_ids=TEXTS[:1])[0].argmax() == 1
    params = SamplingParams(strategy=strategy, max_tokens=8, ignore_eos=True)
    for answer in llm.generate(TEXTS, params):
        assert len(answer.token_ids) == 8
        assert 1 not in answer.token_ids


def test_pegasus(tmp_path: Path) -> None:
    """Norms before the branches and at the ends."""
    check_bart(
        tmp_path,
        "PegasusForConditionalGeneration",
        ("relu", relu),
        bart_shapes(ends=True),
        with_sinusoids,
        before=True,
    )


def test_mbart(tmp_path: Path) -> None:
    """Norms before the branches, at the ends and after the embeddings."""

    def embed(t: Tensors, side: str, text: list[int]) -> Floats:
        words = np.sqrt(HIDDEN) * t["model.shared.weight"][text]
        rows = t[f"model.{side}.embed_positions.weight"][2 : len(text) + 2]
        return centre(words + rows, t, f"model.{side}.layernorm_embedding")

    check_bart(
        tmp_path,
        "MBartForConditionalGeneration",
        ("gelu", gelu_erf),
        bart_shapes(ends=True, embedding=True),
        embed,
        before=True,
    )


T5 = {
    "vocab_size": VOCAB, "d_model": HIDDEN, "d_kv": DIM, "d_ff": INNER, "num_layers": 2,
    "num_decoder_layers": 2, "num_heads": HEADS, "layer_norm_epsilon": 1e-6,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0,
    "is_encoder_decoder": True, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def t5_shapes(tables: int) -> Shapes:
    """The names of T5 1.1, with a table of relative positions in the first layers of each side."""
    shapes: Shapes = {"shared.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    for side, attentions in (
        ("encoder", ("SelfAttention",)),
        ("decoder", ("SelfAttention", "EncDecAttention")),
    ):
        shapes |= norm(f"{side}.final_layer_norm", bias=False)
        for i in range(2):
            block = f"{side}.block.{i}.layer."
            for n, name in enumerate(attentions):
                shapes |= norm(f"{block}{n}.layer_norm", bias=False)
                for part in "qkvo":
                    shapes |= linear(f"{block}{n}.{name}.{part}", HIDDEN, HIDDEN, False)
            if i < tables:
                shapes[f"{block}0.SelfAttention.relative_attention_bias.weight"] = (8, HEADS)
            last = f"{block}{len(attentions)}."
            shapes |= norm(last + "layer_norm", bias=False)
            for name in ("wi_0", "wi_1"):
                shapes |= linear(f"{last}DenseReluDense.{name}", INNER, HIDDEN, False)
            shapes |= linear(f"{last}DenseReluDense.wo", HIDDEN, INNER, False)
    return shapes


def bucket(back: int, causal: bool) -> int:
    """T5's bucket of a key that is `back` tokens before a query: 8 in all, 20 is the farthest."""
    count, offset = 8, 0
    if not causal:
        count, offset = 4, 4 if back < 0 else 0
    back = max(back, 0) if causal else abs(back)
    exact = count // 2
    if back < exact:
        return offset + back
    share = np.log(back / exact) / np.log(20 / exact)
    return offset + min(exact + int(share * (count - exact)), count - 1)


def t5_attention(n: Floats, layer: Tensors, table: Floats, causal: bool) -> Floats:
    """Scores are not scaled; each head adds a number per bucket of distance."""
    q, k, v = (heads(dense(n, layer, f"0.SelfAttention.{part}"), HEADS) for part in "qkv")
    at = range(len(n))
    bias = np.array([[table[bucket(i - j, causal)] for j in at] for i in at])
    scores = np.einsum("qhd,khd->hqk", q, k) + np.moveaxis(bias, -1, 0)
    if causal:
        scores = np.where(np.tri(len(n), dtype=bool), scores, -np.inf)
    out = np.einsum("hqk,khd->qhd", softmax(scores), v)
    return dense(merged(out), layer, "0.SelfAttention.o")


def t5_side(x: Floats, t: Tensors, side: str, encoded: Floats | None = None) -> Floats:
    def normed(x: Floats, layer: Tensors, name: str) -> Floats:
        return rms_norm(x, layer[f"{name}.weight"], 1e-6)

    name = "0.SelfAttention.relative_attention_bias.weight"
    table = t[f"{side}.block.0.layer.{name}"]
    for block in layers_of(t, f"{side}.block."):
        layer = {name.removeprefix("layer."): values for name, values in block.items()}
        table = layer.get(name, table)
        x = x + t5_attention(normed(x, layer, "0.layer_norm"), layer, table, encoded is not None)
        if encoded is not None:
            n, cross = normed(x, layer, "1.layer_norm"), "1.EncDecAttention."
            q = heads(dense(n, layer, cross + "q"), HEADS)
            k, v = (heads(dense(encoded, layer, cross + part), HEADS) for part in "kv")
            x = x + dense(merged(attention(q, k, v, 1.0, causal=False)), layer, cross + "o")
        last = "1." if encoded is None else "2."
        n = normed(x, layer, last + "layer_norm")
        gate = gelu_tanh(dense(n, layer, last + "DenseReluDense.wi_0"))
        up = dense(n, layer, last + "DenseReluDense.wi_1")
        x = x + dense(gate * up, layer, last + "DenseReluDense.wo")
    return normed(x, t, f"{side}.final_layer_norm")


@pytest.mark.parametrize(
    ("architecture", "tables"),
    [("MT5ForConditionalGeneration", 1), ("UMT5ForConditionalGeneration", 2)],
)
def test_t5_line(tmp_path: Path, architecture: str, tables: int) -> None:
    """mT5 is T5 1.1; umT5 has a table of relative positions in every layer."""
    llm, t = served(tmp_path, T5 | {"architectures": [architecture]}, t5_shapes(tables))
    got = llm.logits(ANSWERS, encoder_ids=TEXTS)
    for logits, text, answer in zip(got, TEXTS, ANSWERS, strict=True):
        encoded = t5_side(t["shared.weight"][text], t, "encoder")
        x = t5_side(t["shared.weight"][answer], t, "decoder", encoded)
        close(logits, x @ t["lm_head.weight"].T)
