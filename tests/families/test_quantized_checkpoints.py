"""Quantized checkpoints in whole models: logits are those of the dequantized weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfer import LLM
from jinfer.cli.inspect.match_checkpoint import describe
from jinfer.cli.quantize.quantize_checkpoint import convert
from jinfer.loader.open_model import open_model
from jinfer.loader.weights.plan_weights import plan_weights
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.quant import ReorderedTensor
from jinfer.quant.scaled_tensor import ScaledTensor
from tests.engine.adapters import write_adapter
from tests.loader.checkpoint.quantized_cases import CASES, Case
from tests.loader.checkpoint.quantized_writers import Arrays, mxfp4

type Shapes = dict[str, tuple[int, int]]

VOCAB, HIDDEN, INNER, KV = 96, 128, 256, 64
TOKENS = np.random.default_rng(5).integers(0, VOCAB, 40).tolist()
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rope_theta": 5000.0, "tie_word_embeddings": False,
}  # fmt: skip
PROJECTIONS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
TABLES = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN)}


def plain(rng: np.random.Generator) -> Arrays:
    """What most writers leave as it is."""
    norms = [f"model.layers.{i}.{n}_layernorm" for i in (0, 1) for n in ("input", "post_attention")]
    arrays = {f"{name}.weight": rng.normal(0, 0.1, shape) for name, shape in TABLES.items()}
    arrays |= {f"{n}.weight": rng.normal(1, 0.1, HIDDEN) for n in [*norms, "model.norm"]}
    return {name: values.astype(np.float32) for name, values in arrays.items()}


def test_reordered_weights_by_name(tmp_path: Path) -> None:
    """Their inputs as the model has them, whatever order they are stored in."""
    path = written(tmp_path, CASES["gptq_reordered_sym"])
    name, file = "decoder.1.ffn.up", "model.layers.1.mlp.up_proj.weight"
    wanted = load_file(tmp_path / "plain" / "model.safetensors")[file]
    with LLM(path) as llm:
        assert isinstance(
            llm._engine.runner.parameters[llm._engine.runner.model.names.index(f"{name}.weight")],
            ReorderedTensor,
        )
        weight = llm.weights[name]
        np.testing.assert_allclose(weight.values, wanted, atol=1e-6)
        assert weight.format.startswith("q4")
        llm.update_weights({name: -weight.values})
        # Its 16 levels reach one step further down than up.
        np.testing.assert_allclose(llm.weights[name].values, -wanted, atol=0.02)


def written(
    folder: Path,
    case: Case,
    tables: bool = False,
    kept: str = "",
    shapes: Shapes | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a model's quantized checkpoint, and the dequantized one beside it.

    Args:
        tables: embedding and head are quantized too.
        kept: the modules that are not.
        shapes: of a layer's projections, if not those of Llama.
        config: keys of config.json, if not Llama's.
    """
    rng = np.random.default_rng(3)
    arrays = plain(rng)
    whole = dict(arrays)
    layer = (shapes or PROJECTIONS).items()
    each = {f"model.layers.{i}.{p}": s for i in (0, 1) for p, s in layer}
    for name, shape in (each | (TABLES if tables else {})).items():
        leaves, weights = case.write(rng, *shape)
        whole[f"{name}.weight"] = weights.astype(np.float32)
        arrays.pop(f"{name}.weight", None)
        if kept and kept in name:
            leaves = {"weight": whole[f"{name}.weight"]}
        arrays |= {f"{name}.{leaf}": np.ascontiguousarray(a) for leaf, a in leaves.items()}
    save_both(folder, arrays, whole, CONFIG | dict(config or {}), {case.key: case.config})
    return folder / "q"


def save_both(
    folder: Path, arrays: Arrays, whole: Arrays, config: dict[str, Any], said: dict[str, Any]
) -> None:
    """Writes tensors with what is said of their quantization, and the dequantized ones."""
    for place, tensors, more in (("q", arrays, said), ("plain", whole, {})):
        (folder / place).mkdir()
        save_file(tensors, folder / place / "model.safetensors")
        (folder / place / "config.json").write_text(json.dumps(config | more))


def logits(source: Path, **overrides: Any) -> np.ndarray:
    return LLM(source, dtype="float32", **overrides).logits([TOKENS])[0]


def check(folder: Path, **overrides: Any) -> None:
    """Raises unless both checkpoints in a folder have the same logits."""
    got, wanted = (logits(folder / place, **overrides) for place in ("q", "plain"))
    assert wanted.std() > 0.1
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "tables", "kept"),
    [
        ("gptq_128", False, "down_proj"),
        ("gptq", False, ""),
        ("gptq_reordered", False, ""),
        ("awq_128", False, "k_proj"),
        ("pack_sym", False, ""),
        ("int8", False, ""),
        ("fp8_tensor", False, ""),
        ("fp8_block", False, "down_proj"),
        ("fbgemm", True, ""),
        ("nf4_nested", False, ""),
        ("mlx_4", True, ""),
        ("modelopt_nvfp4", False, ""),
    ],
)
def test_logits_are_those_of_the_dequantized_model(
    tmp_path: Path, name: str, tables: bool, kept: str
) -> None:
    written(tmp_path, CASES[name], tables, kept)
    check(tmp_path)


def test_fused_projections(tmp_path: Path) -> None:
    """Phi-3: the parts of a fused matrix are rows of its codes."""
    fused = {
        "self_attn.qkv_proj": (HIDDEN + 2 * KV, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_up_proj": (2 * INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    config = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    written(tmp_path, CASES["gptq_128"], shapes=fused, config=config)
    check(tmp_path)


@pytest.mark.parametrize("name", ["pack_bf16_128", "pack_reordered", "fp8_block"])
def test_experts(tmp_path: Path, name: str) -> None:
    """Mixtral: experts in tensors of their own, a router that is left out."""
    experts = {n: s for n, s in PROJECTIONS.items() if "mlp" not in n}
    sizes = {"w1": (INNER, HIDDEN), "w2": (HIDDEN, INNER), "w3": (INNER, HIDDEN)}
    for e in range(3):
        experts |= {f"block_sparse_moe.experts.{e}.{n}": s for n, s in sizes.items()}
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 3,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    experts["block_sparse_moe.gate"] = (3, HIDDEN)
    written(tmp_path, CASES[name], kept="block_sparse_moe.gate", shapes=experts, config=config)
    check(tmp_path)


def test_matrices_that_lie_the_other_way_round(tmp_path: Path) -> None:
    """GPT-2: plain matrices have inputs first, quantized ones never."""
    rng = np.random.default_rng(8)
    wide = {"attn.c_attn": 3 * HIDDEN, "attn.c_proj": HIDDEN, "mlp.c_fc": 4 * HIDDEN}
    arrays: Arrays = {"wte.weight": rng.normal(0, 0.1, (VOCAB, HIDDEN))}
    arrays["wpe.weight"] = rng.normal(0, 0.1, (64, HIDDEN))
    for norm in ("h.0.ln_1", "h.0.ln_2", "ln_f"):
        arrays |= {f"{norm}.weight": np.ones(HIDDEN), f"{norm}.bias": np.zeros(HIDDEN)}
    arrays = {name: values.astype(np.float32) for name, values in arrays.items()}
    whole = dict(arrays)
    for name, outputs in (wide | {"mlp.c_proj": HIDDEN}).items():
        inputs = 4 * HIDDEN if name == "mlp.c_proj" else HIDDEN
        leaves, weights = CASES["gptq_128"].write(rng, outputs, inputs)
        bias = {f"h.0.{name}.bias": rng.normal(0, 0.1, outputs).astype(np.float32)}
        whole |= {f"h.0.{name}.weight": np.ascontiguousarray(weights.T.astype(np.float32)), **bias}
        arrays |= {f"h.0.{name}.{leaf}": array for leaf, array in leaves.items()} | bias
    config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": VOCAB,
        "n_embd": HIDDEN, "n_layer": 1, "n_head": 4, "n_positions": 64, "n_ctx": 64,
    }  # fmt: skip
    save_both(tmp_path, arrays, whole, config, {"quantization_config": CASES["gptq_128"].config})
    check(tmp_path)
    targets = ("attn.c_proj",)  # it is square
    adapter = write_adapter(tmp_path / "a", 2, 5, targets=targets, base=tmp_path / "plain")
    check(tmp_path, adapters={"a": {"source": str(adapter), "merge": True}})


def test_an_adapter_is_merged_into_quantized_weights(tmp_path: Path) -> None:
    written(tmp_path, CASES["gptq_128"])
    adapter = write_adapter(tmp_path / "a", 2, 5, base=tmp_path / "plain")
    check(tmp_path, adapters={"a": {"source": str(adapter), "merge": True}})


def planned(source: Path, **overrides: Any) -> dict[str, Any]:
    """A model's parameters by name, as they will be in memory."""
    opened = open_model(source, overrides)
    abstract = build_abstract_model(opened.spec, opened.dtype)
    plan = plan_weights(abstract, opened.spec, opened.checkpoint, opened.activations)
    return dict(zip(plan.model.names, plan.model.parameters, strict=True))


def test_memory_is_that_of_an_own_format(tmp_path: Path) -> None:
    """GPTQ and AWQ take the bytes of jinfer's own four bits, by default."""
    for name, format in (("gptq_128", "q4_b128_sym"), ("awq_128", "q4_b128")):
        (tmp_path / name).mkdir()
        source = written(tmp_path / name, CASES[name])
        own = {"embedding": "plain", "weights": format}
        assert planned(source) == planned(source.parent / "plain", quantization=own)


@pytest.mark.parametrize(("name", "more"), [("fp8_tensor", 4 / INNER), ("fp8_block", 4 / 32)])
def test_fp8_stays_in_its_bits(tmp_path: Path, name: str, more: float) -> None:
    """8 bits a weight and its share of a scale; also converted, by name, and replaced."""
    source, matrix = written(tmp_path, CASES[name]), "decoder.1.ffn.down.weight"
    convert(str(source), tmp_path / "converted", {})
    shown = describe(str(tmp_path / "converted"), {}).rows
    assert [row.type for row in shown if row.parameters == [matrix]] == ["F8_E4M3 scaled"]
    with LLM(source) as llm, LLM(tmp_path / "converted") as again:
        for each in (llm, again):
            held = dict(
                zip(each._engine.runner.model.names, each._engine.runner.parameters, strict=True)
            )
            assert isinstance(held[matrix], ScaledTensor)
            assert held[matrix].nbytes == HIDDEN * INNER * (1 + more)
        wanted = llm.logits([TOKENS])[0]
        np.testing.assert_array_equal(again.logits([TOKENS])[0], wanted)
        whole = load_file(tmp_path / "plain" / "model.safetensors")
        weight = llm.weights[matrix]
        values = whole["model.layers.1.mlp.down_proj.weight"]
        np.testing.assert_allclose(weight.values, values, rtol=1e-6)
        assert weight.format == "float8_e4m3fn"
        assert weight.nbytes == HIDDEN * INNER * (1 + more)
        llm.update_weights({matrix: -weight.values})
        assert np.abs(llm.weights[matrix].values + values).max() < np.abs(values).max() / 16


def test_reordered_inputs_stay_in_their_bits(tmp_path: Path) -> None:
    """By default, too; and converted, which stores their order."""
    source = written(tmp_path, CASES["gptq_reordered_sym"])
    found = planned(source)["decoder.1.ffn.down.weight"]
    assert isinstance(found, ReorderedTensor)
    assert found.nbytes == INNER * (HIDDEN * 4.5 / 8 + 4)
    convert(str(source), tmp_path / "converted", {})
    wanted = LLM(source).logits([TOKENS])[0]
    np.testing.assert_array_equal(LLM(tmp_path / "converted").logits([TOKENS])[0], wanted)
    exact = logits(tmp_path / "plain")
    assert np.abs(wanted - exact).max() < 0.3  # activations are rounded to 8 bits


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """gpt-oss: experts' blocks, gates and ups by turns; they stay in four bits."""
    golden = Path("tests/goldens/gpt_oss")
    arrays = load_file(golden / "model.safetensors")
    whole = {name: values.astype(np.float32) for name, values in arrays.items()}
    rng = np.random.default_rng(6)
    for name in [name for name in arrays if name.endswith("gate_up_proj")]:
        experts, inputs, outputs = arrays.pop(name).shape
        leaves, weights = mxfp4(rng, experts * outputs, inputs)
        whole[name] = weights.reshape(experts, outputs, inputs).swapaxes(1, 2).astype(np.float32)
        whole[name] = np.ascontiguousarray(whole[name])
        shape = (experts, outputs, inputs // 32)
        arrays[f"{name}_blocks"] = leaves["weight_packed"].reshape(*shape, 16)
        arrays[f"{name}_scales"] = leaves["weight_scale"].reshape(shape)
    config = json.loads((golden / "config.json").read_text())
    save_both(tmp_path, arrays, whole, config, {"quantization_config": {"quant_method": "mxfp4"}})
    gate = planned(tmp_path / "q")["decoder.0.ffn.experts.gate.weight"]
    assert gate.format.codebook is not None
    check(tmp_path)
