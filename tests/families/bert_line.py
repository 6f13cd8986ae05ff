"""BERT's layer: what the tests of the families that are built like it share."""

from tests.reference.numpy_blocks import gelu_erf
from tests.reference.numpy_positions import Floats
from tests.reference.numpy_tensors import Tensors, centre, dense

from .tiny import HEADS, HIDDEN, INNER, VOCAB, Shapes, linear, norm

EPS = 1e-12
BERT = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "hidden_act": "gelu",
    "num_hidden_layers": 2, "num_attention_heads": HEADS, "max_position_embeddings": 64,
    "type_vocab_size": 2, "layer_norm_eps": EPS,
}  # fmt: skip
SELF = "attention.self."
NAMES = (SELF + "query", SELF + "key", SELF + "value", "attention.output.dense")


def embedding_shapes(prefix: str, width: int = HIDDEN, types: int = 2, rows: int = 64) -> Shapes:
    shapes: Shapes = {
        f"{prefix}embeddings.word_embeddings.weight": (VOCAB, width),
        f"{prefix}embeddings.position_embeddings.weight": (rows, width),
        f"{prefix}embeddings.token_type_embeddings.weight": (types, width),
    }
    return shapes | norm(f"{prefix}embeddings.LayerNorm", width)


def bert_shapes(prefix: str, names: tuple[str, ...] = NAMES, layers: int = 2) -> Shapes:
    shapes: Shapes = {}
    for i in range(layers):
        layer = f"{prefix}encoder.layer.{i}."
        for name in names:
            shapes |= linear(layer + name, HIDDEN, HIDDEN)
        shapes |= norm(layer + "attention.output.LayerNorm") | norm(layer + "output.LayerNorm")
        shapes |= linear(layer + "intermediate.dense", INNER, HIDDEN)
        shapes |= linear(layer + "output.dense", HIDDEN, INNER)
    return shapes


def embedded(t: Tensors, text: list[int], types: list[int], eps: float = EPS) -> Floats:
    """Words, types and positions, normed."""
    x = t["embeddings.word_embeddings.weight"][text]
    x = x + t["embeddings.token_type_embeddings.weight"][types]
    x = x + t["embeddings.position_embeddings.weight"][: len(text)]
    return centre(x, t, "embeddings.LayerNorm", eps)


def bert_layer(x: Floats, attended: Floats, t: Tensors, eps: float = EPS) -> Floats:
    x = centre(x + attended, t, "attention.output.LayerNorm", eps)
    inner = dense(gelu_erf(dense(x, t, "intermediate.dense")), t, "output.dense")
    return centre(x + inner, t, "output.LayerNorm", eps)


def masked(x: Floats, t: Tensors, names: tuple[str, str], eps: float = EPS) -> Floats:
    """What the head of a masked model gives to the vocabulary."""
    return centre(gelu_erf(dense(x, t, names[0])), t, names[1], eps)
