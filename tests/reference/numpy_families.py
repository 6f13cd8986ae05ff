"""Models of other make: learned positions, ALiBi, partial rotation, one shared key head."""

import numpy as np
from numpy.typing import ArrayLike

from .numpy_blocks import attention, gelu_erf, gelu_tanh
from .numpy_positions import Floats, alibi_slopes_floor, rope
from .numpy_tensors import Tensors, centre, dense, heads, layers_of, merged, within


def gpt2(tensors: Tensors, tokens: ArrayLike, head_count: int) -> Floats:
    """GPT-2 (Radford et al., 2019): logits [length, vocab]; its linear weights are [in, out]."""
    tensors = {
        name: array.T if name.startswith("h.") and array.ndim == 2 else array
        for name, array in within(tensors, "transformer.").items()
    }
    ids = np.asarray(tokens)
    x = tensors["wte.weight"][ids] + tensors["wpe.weight"][: len(ids)]
    for t in layers_of(tensors, "h."):
        fused = heads(dense(centre(x, t, "ln_1"), t, "attn.c_attn"), 3 * head_count)
        q, k, v = np.split(fused, 3, axis=1)
        x = x + dense(merged(attention(q, k, v)), t, "attn.c_proj")
        inner = gelu_tanh(dense(centre(x, t, "ln_2"), t, "mlp.c_fc"))
        x = x + dense(inner, t, "mlp.c_proj")
    return centre(x, tensors, "ln_f") @ tensors["wte.weight"].T


def bloom(tensors: Tensors, tokens: ArrayLike, head_count: int) -> Floats:
    """BLOOM (2022): logits [length, vocab]; q, k and v are fused head by head."""
    tensors = within(tensors, "transformer.")
    slopes = alibi_slopes_floor(head_count)
    x = tensors["word_embeddings.weight"][np.asarray(tokens)]
    x = centre(x, tensors, "word_embeddings_layernorm")
    for t in layers_of(tensors, "h."):
        fused = dense(centre(x, t, "input_layernorm"), t, "self_attention.query_key_value")
        q, k, v = np.moveaxis(fused.reshape(len(x), head_count, 3, -1), 2, 0)
        x = x + dense(merged(attention(q, k, v, slopes=slopes)), t, "self_attention.dense")
        normed = centre(x, t, "post_attention_layernorm")
        inner = gelu_tanh(dense(normed, t, "mlp.dense_h_to_4h"))
        x = x + dense(inner, t, "mlp.dense_4h_to_h")
    return centre(x, tensors, "ln_f") @ tensors["word_embeddings.weight"].T


def phi2(tensors: Tensors, tokens: ArrayLike, head_count: int, rotary_dim: int) -> Floats:
    """Phi-2 (2023): logits [length, vocab]; attention and MLP side by side after one norm."""
    x = tensors["model.embed_tokens.weight"][np.asarray(tokens)]
    positions = np.arange(len(x))
    for t in layers_of(tensors):
        normed = centre(x, t, "input_layernorm")
        q, k, v = (heads(dense(normed, t, f"self_attn.{n}_proj"), head_count) for n in "qkv")
        q, k = (rope(y, positions, rotary_dim=rotary_dim) for y in (q, k))
        attended = dense(merged(attention(q, k, v)), t, "self_attn.dense")
        x = x + attended + dense(gelu_tanh(dense(normed, t, "mlp.fc1")), t, "mlp.fc2")
    return dense(centre(x, tensors, "model.final_layernorm"), tensors, "lm_head")


def gptj(tensors: Tensors, tokens: ArrayLike, head_count: int, rotary_dim: int) -> Floats:
    """GPT-J (2021): logits [length, vocab]; as Phi-2, but neighbours are rotated."""
    inner = within(tensors, "transformer.")
    x = inner["wte.weight"][np.asarray(tokens)]
    positions = np.arange(len(x))
    for t in layers_of(inner, "h."):
        normed = centre(x, t, "ln_1")
        q, k, v = (heads(dense(normed, t, f"attn.{n}_proj"), head_count) for n in "qkv")
        q, k = (rope(y, positions, pairs="adjacent", rotary_dim=rotary_dim) for y in (q, k))
        attended = dense(merged(attention(q, k, v)), t, "attn.out_proj")
        x = x + attended + dense(gelu_tanh(dense(normed, t, "mlp.fc_in")), t, "mlp.fc_out")
    return dense(centre(x, inner, "ln_f"), tensors, "lm_head")


def falcon7b(tensors: Tensors, tokens: ArrayLike, head_count: int) -> Floats:
    """Falcon-7B (2023): logits [length, vocab]; as Phi-2, with one key head for all."""
    tensors = within(tensors, "transformer.")
    x = tensors["word_embeddings.weight"][np.asarray(tokens)]
    positions = np.arange(len(x))
    for t in layers_of(tensors, "h."):
        normed = centre(x, t, "input_layernorm")
        fused = heads(dense(normed, t, "self_attention.query_key_value"), head_count + 2)
        q, k, v = fused[:, :-2], fused[:, -2:-1], fused[:, -1:]
        attended = merged(attention(rope(q, positions), rope(k, positions), v))
        inner = gelu_erf(dense(normed, t, "mlp.dense_h_to_4h"))
        x = x + dense(attended, t, "self_attention.dense") + dense(inner, t, "mlp.dense_4h_to_h")
    return centre(x, tensors, "ln_f") @ tensors["word_embeddings.weight"].T
