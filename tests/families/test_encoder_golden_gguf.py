"""Goldens with an encoder as GGUF files have them, against the reference's values.

The files are written here with the names and the layout of llama.cpp's converter.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from jinfer import LLM
from jinfer.loader.checkpoint import open_checkpoint

from .gguf_files import write_gguf
from .test_encoder_gguf import renamed

GOLDENS = Path(__file__).parents[1] / "goldens"
PARTS = ("SelfAttention", "EncDecAttention")

type Arrays = dict[str, np.ndarray]


def stored(golden: str) -> tuple[Arrays, dict[str, Any], Arrays]:
    """The golden's tensors, its config and the reference's values."""
    folder = GOLDENS / golden
    tensors = open_checkpoint(folder).tensors
    arrays = {name: tensor.read().astype(np.float32) for name, tensor in tensors.items()}
    with np.load(folder / "expected.npz") as expected:
        return arrays, json.loads((folder / "config.json").read_text()), dict(expected)


def test_jina_embeddings_v3(tmp_path: Path) -> None:
    """Without the pooler, which embeddings do not need, and the adapters, which are files apart."""
    tensors, config, expected = stored("jina_v3")
    names = {
        "embeddings.word_embeddings": "token_embd", "emb_ln": "token_embd_norm",
        "embeddings.token_type_embeddings": "token_types", "mixer.Wqkv": "attn_qkv",
        "mixer.out_proj": "attn_output", "norm1": "attn_output_norm", "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down", "norm2": "layer_output_norm",
    }  # fmt: skip
    keys = {
        "vocab_size": config["vocab_size"], "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"], "context_length": 256,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.layer_norm_epsilon": config["layer_norm_eps"],
        "rope.freq_base": config["rope_theta"], "attention.causal": False,
    }  # fmt: skip
    write_gguf(tmp_path / "m.gguf", "jina-bert-v3", keys, renamed(tensors, names))
    got = LLM(tmp_path / "m.gguf", dtype="float32").hidden([expected["input_ids"][0].tolist()])[0]
    np.testing.assert_allclose(got, expected["last_hidden_state"][0], rtol=0, atol=2e-4)


def of_t5(name: str) -> str:
    """GGUF's name of a tensor of T5."""
    found = re.fullmatch(
        r"(en|de)coder\.block\.(\d+)\.layer\.(\d)\.(\w+)(?:\.(\w+))?\.weight", name
    )
    if not found:
        whole = {
            "shared": "token_embd", "lm_head": "output", "encoder.final_layer_norm":
            "enc.output_norm", "decoder.final_layer_norm": "dec.output_norm",
        }  # fmt: skip
        return f"{whole[name.removesuffix('.weight')]}.weight"
    stack, layer, number, module, inner = found.groups()
    cross = "cross_" if stack == "de" and number == "1" else ""
    if module in PARTS:
        last = f"{cross}attn_{'rel_b' if inner == 'relative_attention_bias' else inner}"
    elif module == "layer_norm":
        is_ffn = number == ("2" if stack == "de" else "1")
        last = "ffn_norm" if is_ffn else f"{cross}attn_norm"
    else:
        last = {"wi": "ffn_up", "wi_0": "ffn_gate", "wi_1": "ffn_up", "wo": "ffn_down"}[str(inner)]
    return f"{stack}c.blk.{layer}.{last}.weight"


def test_flan_t5(tmp_path: Path) -> None:
    """A gated feed-forward, a head of its own, and tables of distances in the first layers."""
    tensors, config, expected = stored("flan_t5")
    keys = {
        "vocab_size": config["vocab_size"], "embedding_length": config["d_model"],
        "block_count": config["num_layers"], "decoder_block_count": config["num_decoder_layers"],
        "context_length": 512, "feed_forward_length": config["d_ff"],
        "attention.head_count": config["num_heads"], "attention.key_length": config["d_kv"],
        "attention.value_length": config["d_kv"],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "attention.relative_buckets_count": config["relative_attention_num_buckets"],
        "decoder_start_token_id": config["decoder_start_token_id"],
    }  # fmt: skip
    file = {of_t5(name): values for name, values in tensors.items() if "embed_tokens" not in name}
    write_gguf(tmp_path / "m.gguf", "t5", keys, file)
    llm = LLM(tmp_path / "m.gguf", dtype="float32")
    assert llm.session.opened.decoder_prefix == (config["decoder_start_token_id"],)
    text, answer = (expected[name][0].tolist() for name in ("input_ids", "decoder_input_ids"))
    got = llm.logits([answer], encoder_ids=[text])[0]
    np.testing.assert_allclose(got, expected["logits"][0], rtol=0, atol=2e-4)
