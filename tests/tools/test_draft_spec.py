"""Drafts of whole specifications, of names, shapes and config.json alone: every checkpoint is
unseen, as a draft knows no families."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tools.measure_drafts import checkpoints, measure

from .test_inspect import printed

GOLDENS = Path(__file__).parents[1] / "goldens"
# A checkpoint of each block -> what its draft has to have found.
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
    "recurrent_gemma": ('kind = "rglru"', 'kind = "block_linear"'),
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


@pytest.mark.parametrize("name", BLOCKS)
def test_a_draft_finds_a_models_blocks_and_resolves(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "drafted.toml"
    printed(capsys, GOLDENS / name, "--draft", file)
    text = file.read_text()
    assert [part for part in BLOCKS[name] if part not in text] == []
    result = measure(GOLDENS / name)
    assert result.resolves or result.named, result.problem
    assert "#   which dimensions are rotated" in text or "rope" not in text or "pairs" in text


def test_what_has_no_place_is_named_and_the_rest_is_drafted(tmp_path: Path) -> None:
    tensors = load_file(GOLDENS / "qwen3" / "model.safetensors")
    tensors["model.layers.1.self_attn.indexer.wk.weight"] = np.zeros((4, 64), np.float32)
    tensors["vision_tower.layers.0.proj.weight"] = np.zeros((8, 8), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((GOLDENS / "qwen3" / "config.json").read_bytes())
    result = measure(tmp_path)
    assert result.named, result.problem
    assert not result.resolves


def test_a_hybrids_draft_has_the_logits_of_its_reference() -> None:
    """State, experts, a shared expert and four multipliers, nothing added by hand."""
    result = measure(GOLDENS / "granite4_h_tiny", logits=True)
    assert result.equal, (result.difference, result.problem)


@pytest.mark.soak
def test_most_checkpoints_resolve_as_drafted() -> None:
    results = [measure(source) for source in checkpoints([GOLDENS]) if "tok_" not in str(source)]
    resolved = sum(result.resolves for result in results)
    assert resolved >= 0.85 * len(results), [r for r in results if not r.resolves]
