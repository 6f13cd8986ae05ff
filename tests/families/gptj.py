"""A tiny GPT-J, on which docs/specs.md shows how a specification is written.

`python -m tests.families.gptj FOLDER` writes it, with the logits that its definition gives.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.reference.numpy_families import gptj

from .tiny import Shapes, linear, norm, written

CONFIG: dict[str, Any] = {
    "architectures": ["GPTJForCausalLM"],
    "model_type": "gptj",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-05,
    "n_embd": 64,
    "n_head": 4,
    "n_inner": None,
    "n_layer": 2,
    "n_positions": 128,
    "rotary": True,
    "rotary_dim": 8,
    "scale_attn_weights": True,
    "tie_word_embeddings": False,
    "vocab_size": 320,
}
TOKENS = np.random.default_rng(7).integers(0, CONFIG["vocab_size"], 40)


def gptj_shapes(config: Mapping[str, Any]) -> Shapes:
    """The tensors of a GPT-J, with the buffers that its checkpoints have."""
    vocab, hidden, context = config["vocab_size"], config["n_embd"], config["n_positions"]
    shapes: Shapes = {"transformer.wte.weight": (vocab, hidden)}
    for i in range(config["n_layer"]):
        layer = f"transformer.h.{i}."
        shapes |= norm(layer + "ln_1", hidden)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= linear(f"{layer}attn.{part}", hidden, hidden, bias=False)
        shapes |= {layer + "attn.bias": (1, 1, context, context), layer + "attn.masked_bias": ()}
        shapes |= linear(layer + "mlp.fc_in", 4 * hidden, hidden)
        shapes |= linear(layer + "mlp.fc_out", hidden, 4 * hidden)
    return shapes | norm("transformer.ln_f", hidden) | linear("lm_head", vocab, hidden)


def write(folder: Path) -> None:
    """Writes the checkpoint, and expected.npz with `tokens` and their `logits`."""
    tensors = written(folder, CONFIG, gptj_shapes(CONFIG))
    logits = gptj(tensors, TOKENS, CONFIG["n_head"], CONFIG["rotary_dim"])
    np.savez(folder / "expected.npz", tokens=TOKENS, logits=logits.astype(np.float32))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
