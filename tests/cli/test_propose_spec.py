"""Proposed specs of all goldens: whether they load, and whether they have the reference's logits.

A proposal does not read other families, so every golden counts as an unknown architecture.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfer import LLM
from jinfer.api.user_errors import USER_ERRORS
from jinfer.cli.inspect.match_checkpoint import describe
from jinfer.cli.propose.checkpoint_layers import module_name
from jinfer.cli.propose.propose_spec import propose_spec
from jinfer.loader.open_model import open_files

GOLDENS = Path(__file__).parents[1] / "goldens"
SOURCES = {
    folder.name: next(folder.glob("*.gguf"), folder)
    for folder in sorted(GOLDENS.iterdir())
    if any(any(folder.glob(f"*.{kind}")) for kind in ("safetensors", "bin", "gguf"))
    if not folder.name.startswith(("tok_", "vlm_")) and folder.name != "vocab"
}
# Comments of their proposals name all that has no place in them.
NAMED = {"bert_cls", "dbrx", "hunyuan_dense", "llama4", "modernbert_decoder"}
# They have blocks that no proposal knows (AltUp, per-layer embeddings, experts of attention).
FAIL = {"gemma3n", "gemma4", "jetmoe"}
EQUAL = {
    *("aquila2", "deepseek_moe", "deepseek_v2", "deepseek_v32", "falcon40b", "falcon7b"),
    *("gguf_falcon7b", "gguf_orion", "gguf_qwen15", "gguf_qwen3", "gpt2", "gpt_bigcode"),
    *("gpt_neox", "gpt_oss", "granite4_h_tiny", "internlm", "internlm3", "kimi_linear", "lfm2"),
    *("llama2", "llama31", "llama_rope_linear", "mamba", "mamba2", "minicpm", "ministral3"),
    *("mistral", "mixtral", "olmo2", "openllama", "opt13b", "opt350m", "orion", "phi2"),
    *("phi3_mini_4k", "probe_glm4_moe_v5", "probe_gpt2_unscaled", "probe_qwen3_window", "qwen15"),
    *("qwen25_yarn", "qwen3", "qwen3_moe", "rwkv4", "seed_oss", "smollm2", "starcoder2"),
    *("xverse", "yi"),
}
# A golden of each kind of block -> parts of its proposal.
BLOCKS = {
    "granite4_h_tiny": ('kind = "ssm"', 'kind = "moe"', "ffn(n) + shared_expert(n)"),
    "nemotron_h": (
        'groups = "ssm_groups"',
        "correction_bias = true",
        "$hybrid_override_pattern[i]",
    ),
    "falcon_h1": ("attn(n)", "ssm_out("),
    "mamba": ('kind = "selective_scan"',),
    "lfm2": ("conv_c(n) * conv(conv_b(n) * conv_x(n))", "qk_norm"),
    "qwen3_next": (
        'kind = "delta"',
        'gate = { per = "element" }',
        "sigmoid(shared_expert_gate(n))",
    ),
    "kimi_linear": ("channels = true", 'kind = "latent_attention"'),
    "recurrent_gemma": ("recurrence_gate(h)", 'kind = "block_linear"'),
    "minimax": ('kind = "linear_attention"',),
    "rwkv4": ('kind = "wkv"', 'kind = "shift"'),
    "deepseek_v2": ('kind = "latent_attention"', "first_k_dense_replace"),
    "deepseek_v32": ('top_k = "$index_topk"', '"decoder.{i}.attn.indexer.k_norm"'),
    "gpt_oss": ("sinks = true", "bias = true", "clamped_swiglu"),
    "gemma2": ("attn_post(attn(attn_norm(x)))", "ffn_post(ffn(ffn_norm(x)))", "softcap"),
    "olmo2": ("attn_post(attn(x))", 'over = "width"'),
    "t5": ('kind = "relative"', "cross(cross_norm(x), encoded)"),
    "bert": ("attn_norm(x + attn(x))", "mlm_norm"),
}


@dataclass(frozen=True)
class Proposal:
    """A proposal for a checkpoint: whether it loads, or its comments name the rest."""

    text: str
    loads: bool
    named: bool = False
    problem: str = ""


def proposal(source: Path, file: Path) -> Proposal:
    """The proposal for a checkpoint, written to a file."""
    text = propose_spec(open_files(source, {}), str(source.resolve()))
    file.write_text(text, encoding="utf-8")
    try:
        found = describe(file, {})
    except USER_ERRORS as error:
        return Proposal(text, False, problem=str(error))
    comments = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    names = {f'"{module_name(tensor.name)}"' for tensor in found.unused}
    names |= {key.partition(".")[0] for key in found.consequences if found.refused}
    wrong = found.spec is None or bool(found.missing) or bool(found.wrong)
    named = not wrong and all(name in comments for name in names)
    unused = [tensor.name for tensor in found.unused]
    return Proposal(text, found.fits, named, f"{found.problem} {unused[:3]} {found.missing[:3]}")


@pytest.mark.parametrize("name", SOURCES)
def test_a_proposal_loads(name: str, tmp_path: Path) -> None:
    found = proposal(SOURCES[name], tmp_path / "proposed.toml")
    assert [part for part in BLOCKS.get(name, ()) if part not in found.text] == []
    assert found.loads == (name not in NAMED | FAIL), found.problem
    assert found.named == (name not in FAIL), found.problem


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("granite4_h_tiny", "rwkv4") else [pytest.mark.soak])
        for name in sorted(EQUAL)
    ],
)
def test_a_proposal_has_the_logits_of_the_reference(name: str, tmp_path: Path) -> None:
    file = tmp_path / "proposed.toml"
    proposal(SOURCES[name], file)
    places = [GOLDENS / folder / "expected.npz" for folder in (name, name.removeprefix("gguf_"))]
    with np.load(next(place for place in places if place.exists())) as arrays:
        tokens = arrays["tokens"] if "tokens" in arrays else arrays["input_ids"][0]
        expected = arrays["logits"].reshape(-1, arrays["logits"].shape[-1])
    got = LLM(file, dtype="float32").logits([tokens.tolist()])[0]
    np.testing.assert_allclose(got, expected[: len(got)], rtol=0, atol=2e-4)


def test_modules_without_a_place_are_named(tmp_path: Path) -> None:
    tensors = load_file(GOLDENS / "qwen3" / "model.safetensors")
    tensors["model.layers.1.self_attn.indexer.wk.weight"] = np.zeros((4, 64), np.float32)
    tensors["vision_tower.layers.0.proj.weight"] = np.zeros((8, 8), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((GOLDENS / "qwen3" / "config.json").read_bytes())
    found = proposal(tmp_path, tmp_path / "proposed.toml")
    assert found.named, found.problem
    assert not found.loads
