"""Goldens as other people store the same model: without its head, prefix or shared embedding."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfer import LLM
from jinfer.loader.checkpoint import open_checkpoint
from jinfer.loader.weights.tensor_mapping import find_origins
from jinfer.modelspec.blocks import HeadSpec
from jinfer.nn.abstract_model import build_abstract_model
from tests.loader.resolving import resolved

from .gguf_files import write_gguf

GOLDENS = Path(__file__).parents[1] / "goldens"

type Arrays = dict[str, np.ndarray]


def arrays(golden: str) -> Arrays:
    tensors = open_checkpoint(GOLDENS / golden).tensors
    return {name: tensor.read().astype(np.float32) for name, tensor in tensors.items()}


def stored(
    folder: Path, golden: str, change: Callable[[Arrays], Arrays], architecture: str, **config: Any
) -> Path:
    """The golden with other tensors and another architecture."""
    said = json.loads((GOLDENS / golden / "config.json").read_text())
    said |= {"architectures": [architecture], **config}
    (folder / "config.json").write_text(json.dumps(said))
    tensors = {name: np.ascontiguousarray(each) for name, each in change(arrays(golden)).items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def values(golden: str) -> Arrays:
    with np.load(GOLDENS / golden / "expected.npz") as found:
        return dict(found)


def bare(prefix: str) -> Callable[[Arrays], Arrays]:
    """Names as a model without a head has them, and no head."""

    def change(tensors: Arrays) -> Arrays:
        heads = ("lm_head.", "embed_out.", "output_layer.")
        kept = {name: each for name, each in tensors.items() if not name.startswith(heads)}
        return {name.removeprefix(prefix): each for name, each in kept.items()}

    return change


@pytest.mark.parametrize(
    ("golden", "architecture", "prefix"),
    [
        ("llama2", "LlamaModel", "model."),
        ("mistral", "MistralModel", "model."),
        ("qwen15", "Qwen2Model", "model."),
        ("qwen3", "Qwen3Model", "model."),
        ("qwen3_moe", "Qwen3MoeModel", "model."),
        ("gemma", "GemmaModel", "model."),
        ("gemma2", "Gemma2Model", "model."),
        ("mixtral", "MixtralModel", "model."),
        ("olmo2", "Olmo2Model", "model."),
        ("phi2", "PhiModel", "model."),
        ("phi3_mini_4k", "Phi3Model", "model."),
        ("starcoder2", "Starcoder2Model", "model."),
        ("deepseek_v2", "DeepseekV2Model", "model."),
        ("minicpm3", "MiniCPM3ForCausalLM", "model."),
        ("glm", "GlmModel", "model."),
        ("opt13b", "OPTModel", "model."),
        ("gpt2", "GPT2Model", "transformer."),
        ("bloom", "BloomModel", "transformer."),
        ("falcon7b", "FalconModel", "transformer."),
        ("gpt_neox", "GPTNeoXModel", "gpt_neox."),
        ("roberta", "CamembertModel", "roberta."),
        ("mpnet", "MPNetModel", "mpnet."),
    ],
)
def test_every_parameter_has_its_tensor(
    tmp_path: Path, golden: str, architecture: str, prefix: str
) -> None:
    """Without a head, or with the embedding as one where the family ties them."""
    found = resolved(stored(tmp_path, golden, bare(prefix), architecture), {})
    find_origins(
        build_abstract_model(found.spec, jnp.float32), found.checkpoint, found.spec.tensors
    )
    heads = [block for _, block in found.spec.shared if isinstance(block, HeadSpec)]
    assert all(head.tied for head in heads)
    assert found.spec.generates == bool(heads and found.spec.decoder)


@pytest.mark.parametrize(("both", "kind"), [(False, "decoder-only"), (True, "encoder-only")])
def test_a_gemma_3_that_reads_both_ways_is_an_encoder(
    tmp_path: Path, both: bool, kind: str
) -> None:
    folder = stored(
        tmp_path,
        "gemma2",
        bare("model."),
        "Gemma3TextModel",
        use_bidirectional_attention=both,
    )
    assert resolved(folder, {}).spec.type == kind


def test_names_without_their_prefix(tmp_path: Path) -> None:
    """With a head: the logits are the golden's."""
    folder = stored(
        tmp_path,
        "qwen3",
        lambda tensors: {name.removeprefix("model."): each for name, each in tensors.items()},
        "Qwen3ForCausalLM",
    )
    expected = values("qwen3")
    got = LLM(folder, dtype="float32").logits([expected["input_ids"][0].tolist()])[0]
    np.testing.assert_allclose(got, expected["logits"][0], rtol=0, atol=2e-4)


def renamed_embedding(*names: str) -> Callable[[Arrays], Arrays]:
    def change(tensors: Arrays) -> Arrays:
        shared = tensors["shared.weight"]
        rest = {n: each for n, each in tensors.items() if "embed_tokens" not in n}
        del rest["shared.weight"]
        return rest | {f"{name}.weight": shared.copy() for name in names}

    return change


@pytest.mark.parametrize(
    "names", [("decoder.embed_tokens",), ("encoder.embed_tokens", "decoder.embed_tokens")]
)
def test_t5_without_a_shared_embedding(tmp_path: Path, names: tuple[str, ...]) -> None:
    folder = stored(tmp_path, "flan_t5", renamed_embedding(*names), "T5ForConditionalGeneration")
    expected = values("flan_t5")
    llm = LLM(folder, dtype="float32")
    text, answer = (expected[name][0].tolist() for name in ("input_ids", "decoder_input_ids"))
    got = llm.logits([answer], encoder_ids=[text])[0]
    np.testing.assert_allclose(got, expected["logits"][0], rtol=0, atol=2e-4)


@pytest.mark.parametrize("golden", ["t5", "flan_t5"])
def test_the_encoder_of_t5_alone(tmp_path: Path, golden: str) -> None:
    def encoder(tensors: Arrays) -> Arrays:
        return {n: each for n, each in tensors.items() if n.startswith(("shared.", "encoder."))}

    llm = LLM(stored(tmp_path, golden, encoder, "T5EncoderModel"), dtype="float32")
    expected = values(golden)
    got = llm.hidden([expected["input_ids"][0].tolist()])[0]
    np.testing.assert_allclose(got, expected["encoder_last_hidden_state"][0], rtol=0, atol=2e-4)


def test_a_gguf_bert_without_token_types(tmp_path: Path) -> None:
    """A DistilBERT is such a file, with positions that the context's key says too many of."""
    names = {
        "embeddings.word_embeddings": "token_embd",
        "embeddings.position_embeddings": "position_embd",
        "embeddings.LayerNorm": "token_embd_norm",
        "attention.q_lin": "attn_q",
        "attention.k_lin": "attn_k",
        "attention.v_lin": "attn_v",
        "attention.out_lin": "attn_output",
        "sa_layer_norm": "attn_output_norm",
        "ffn.lin1": "ffn_up",
        "ffn.lin2": "ffn_down",
        "output_layer_norm": "layer_output_norm",
    }
    tensors: Arrays = {}
    for name, each in arrays("distilbert").items():
        module, _, leaf = name.removeprefix("distilbert.").rpartition(".")
        block = ""
        if module.startswith("transformer.layer."):
            number, _, module = module.removeprefix("transformer.layer.").partition(".")
            block = f"blk.{number}."
        if module in names:
            tensors[f"{block}{names[module]}.{leaf}"] = each
    config = json.loads((GOLDENS / "distilbert" / "config.json").read_text())
    keys = {
        "vocab_size": config["vocab_size"], "embedding_length": config["dim"],
        "block_count": config["n_layers"], "feed_forward_length": config["hidden_dim"],
        "attention.head_count": config["n_heads"], "attention.layer_norm_epsilon": 1e-12,
        "context_length": 8192,
    }  # fmt: skip
    write_gguf(tmp_path / "m.gguf", "bert", keys, tensors)
    expected = values("distilbert")
    llm = LLM(tmp_path / "m.gguf", dtype="float32")
    assert llm.context == config["max_position_embeddings"]
    got = llm.hidden([expected["input_ids"][0].tolist()])[0]
    np.testing.assert_allclose(got, expected["last_hidden_state"][0], rtol=0, atol=2e-4)
