"""Makes the checkpoints in quantized/ with the packages that write such files.

Each package needs an environment of Python 3.11 of its own (`pip install torch==2.13.0
transformers PACKAGE`), and all run on a CPU:

    python tests/loader/checkpoint/make_quantized.py PACKAGE [BASES]

Made with bitsandbytes 0.50.2, hqq 0.2.8.post1, mlx[cpu] 0.32.4 and mlx-lm 0.32.2, llmcompressor
0.14.0.1 (compressed-tensors 0.19.0), gptqmodel 7.6.0 (GPTQMODEL_CPU_WORKERS=4), auto-round 0.15.1,
nvidia-modelopt 0.47.0, amd-quark 0.13, autoawq 0.2.9, torchao 0.18.0, optimum-quanto 0.2.7.
BASES is a folder for the models that are quantized; all packages must be given the same one.

`expected.npz` has the logits of transformers with the matrices decoded in float32: by the package's
own functions, or, where these round to float16 (GPTQ, AWQ), by the layout's definition.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "quantized"
IDS = [1, 5, 9, 40, 3, 7, 58, 61, 17, 2, 30, 12]
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.1, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MORE: dict[str, Any] = {
    "llama": {},
    "llama_mha": {"num_key_value_heads": 4},  # AutoAWQ wants whole blocks of 64 outputs
    "qwen3": {"head_dim": 16},
    "mixtral": {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
}
CALIBRATION = np.random.default_rng(1).integers(3, 64, (16, 64)).tolist()

Matrices = Iterator[tuple[str, np.ndarray]]


def make_bases(folder: Path) -> None:
    """Tiny models with random weights in float16, and a tokenizer of numbers."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(46)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    for name, more in MORE.items():
        config = AutoConfig.for_model(name.removesuffix("_mha"), **{**SIZES, **more})
        AutoModelForCausalLM.from_config(config).half().save_pretrained(folder / name)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", pad_token="0")
        tokenizer.save_pretrained(folder / name)


def keep(base: Path, name: str, written: Path, matrices: Matrices) -> None:
    """Takes what jinfer reads of a written folder, and adds the expected logits."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    count, parameters = 0, dict(model.named_parameters())
    for tensor, values in stored(written).items():  # some writers round what they leave plain
        if tensor in parameters and parameters[tensor].shape == values.shape:
            parameters[tensor].data = torch.tensor(values.astype(np.float32))
    for module, values in matrices:
        before, _, leaf = module.replace("block_sparse_moe", "mlp").rpartition(".")
        leaf = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(leaf, leaf)
        stack, _, expert = before.partition(".experts")
        experts = stack.removesuffix(".switch_mlp") + ".experts"
        weights = torch.tensor(np.asarray(values, np.float32))
        fused = getattr(dict(model.named_modules()).get(experts), "gate_up_proj", None)
        if fused is not None and (expert or stack.endswith(".switch_mlp")):
            whole = model.get_parameter(f"{experts}.down_proj") if leaf == "down_proj" else fused
            half = whole.shape[-2] // (1 if leaf == "down_proj" else 2)
            rows = slice(half, None) if leaf == "up_proj" else slice(0, half)
            whole.data[int(expert[1:]) if expert else slice(None), ..., rows, :] = weights
        else:
            model.get_submodule(f"{before}.{leaf}".lstrip(".")).weight.data = weights
        count += 1
    assert count >= 7, f"{name}: {count} matrices"
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0].numpy()
    out = DATA / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for file in ("config.json", "model.safetensors"):
        shutil.copy(written / file, out / file)
    np.savez(out / "expected.npz", input_ids=[IDS], logits=logits)


def stored(folder: Path) -> dict[str, np.ndarray]:
    """A folder's tensors; BF16 ones in float32."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors").items()
    wide = {name: t.float() if t.is_floating_point() else t for name, t in tensors}
    return {name: tensor.numpy() for name, tensor in wide.items()}


def bitsandbytes(bases: Path, out: Path) -> None:
    import torch
    from bitsandbytes import nn
    from bitsandbytes.functional import dequantize_4bit
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    def decoded(folder: Path) -> Matrices:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear4bit):
                state = module.weight.quant_state
                state.dtype = torch.float32
                yield name, dequantize_4bit(module.weight.data, state).numpy()
            elif isinstance(module, nn.Linear8bitLt):
                rows = module.weight.SCB[:, None].float() / 127
                yield name, (module.weight.data.float() * rows).numpy()

    nf4 = {"bnb_4bit_quant_type": "nf4"}
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "bitsandbytes_nf4": ("llama", nf4),
        "bitsandbytes_nf4_nested": ("llama", {**nf4, "bnb_4bit_use_double_quant": True}),
        "bitsandbytes_int8": ("llama", {"load_in_8bit": True}),
    }
    for name, (base, stated) in cases.items():
        config = BitsAndBytesConfig(load_in_4bit="load_in_8bit" not in stated, **stated)
        model = AutoModelForCausalLM.from_pretrained(
            bases / base, quantization_config=config, dtype=torch.float16, device_map="cpu"
        )
        model.save_pretrained(out / name)
        keep(bases / base, name, out / name, decoded(out / name))


def hqq(bases: Path, out: Path) -> None:
    import torch
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel
    from transformers import AutoModelForCausalLM

    cases: dict[str, tuple[str, dict[str, int]]] = {
        "hqq_4": ("llama", {"nbits": 4, "group_size": 64, "axis": 1}),
        "hqq_3": ("llama", {"nbits": 3, "group_size": 64, "axis": 1}),
        "hqq_2_axis0": ("llama", {"nbits": 2, "group_size": 32, "axis": 0}),
    }
    for name, (base, stated) in cases.items():
        model = AutoModelForCausalLM.from_pretrained(bases / base, dtype=torch.float16)
        AutoHQQHFModel.quantize_model(
            model, BaseQuantizeConfig(**stated), compute_dtype=torch.float32, device="cpu"
        )
        AutoHQQHFModel.save_to_safetensors(model, str(out / name))
        modules = [(n, m) for n, m in model.named_modules() if type(m).__name__ == "HQQLinear"]
        matrices = ((n, m.dequantize().float().numpy()) for n, m in modules)
        keep(bases / base, name, out / name, matrices)


def mlx(bases: Path, out: Path) -> None:
    import mlx.core as mx
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    cases: dict[str, tuple[str, int, int, str]] = {
        "mlx_3": ("llama", 3, 32, "affine"),
        "mlx_6": ("llama", 6, 64, "affine"),
        "mlx_mixtral": ("mixtral", 4, 64, "affine"),
        "mlx_nvfp4": ("llama", 4, 16, "nvfp4"),
        "mlx_mxfp8": ("llama", 8, 32, "mxfp8"),
    }

    def decoded(model: Any) -> Matrices:
        for name, module in model.named_modules():
            if "Quantized" in type(module).__name__:
                numbers = [module.scales, module.get("biases")]
                if module.mode == "affine":  # in the type of these
                    numbers = [each.astype(mx.float32) for each in numbers]
                stated = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
                values = mx.dequantize(module.weight, *numbers, **stated)
                yield name, np.array(values.astype(mx.float32))

    mx.set_default_device(mx.cpu)
    for name, (base, bits, group, mode) in cases.items():
        model, config = load_model(bases / base)
        model, config = quantize_model(model, config, group, bits, mode=mode)
        (out / name).mkdir(exist_ok=True)
        save_model(out / name, model)
        save_config(config, out / name / "config.json")
        keep(bases / base, name, out / name, decoded(model))


def llmcompressor(bases: Path, out: Path) -> None:
    import torch
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    four: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": 32}
    cases: dict[str, tuple[str, str | dict[str, Any]]] = {
        "llmcompressor_w4a16_asym": ("llama", {**four, "symmetric": False}),
        "llmcompressor_w8a16": ("llama", {"num_bits": 8, "strategy": "channel"}),
        "llmcompressor_w8a8": ("llama", "W8A8"),
        "llmcompressor_fp8_dynamic": ("llama", "FP8_DYNAMIC"),
        "llmcompressor_nvfp4a16": ("llama", "NVFP4A16"),
        "llmcompressor_mxfp4a16": ("llama", "MXFP4A16"),
        "llmcompressor_mixtral": ("mixtral", four),
    }
    for name, (base, scheme) in cases.items():
        model = AutoModelForCausalLM.from_pretrained(bases / base, dtype=torch.float16)
        plain = ["lm_head", "re:.*mlp.gate$"]
        targets: dict[str, Any] = {"targets": ["Linear"], "scheme": scheme}
        if not isinstance(scheme, str):
            group = {"targets": ["Linear"], "weights": {"type": "int", **scheme}}
            targets = {"config_groups": {"group_0": group}}
        recipe = QuantizationModifier(ignore=plain, **targets)
        oneshot(model=model, recipe=recipe)
        model.save_pretrained(out / name, save_compressed=True)
        keep(bases / base, name, out / name, compressed(out / name))


def compressed(folder: Path) -> Matrices:
    """Matrices of compressed-tensors, unpacked by its own functions."""
    import torch
    from compressed_tensors.compressors import unpack_from_int32
    from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = {name: torch.tensor(array) for name, array in stored(folder).items()}
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        if leaf != "weight_scale":
            continue
        scale = tensors[name].float()
        packed = tensors.get(f"{module}.weight_packed")
        zero = tensors.get(f"{module}.weight_zero_point")
        if packed is None:
            codes = tensors[f"{module}.weight"]
        elif packed.dtype == torch.int32:
            bits = config["config_groups"]["group_0"]["weights"]["num_bits"]
            shape = torch.Size(tensors[f"{module}.weight_shape"].tolist())
            codes = unpack_from_int32(packed, bits, shape)
            if zero is not None:
                zero = unpack_from_int32(zero, bits, scale.shape, packed_dim=0)
        else:
            rows, halves = packed.shape
            codes = unpack_fp4_from_uint8(packed, rows, 2 * halves, dtype=torch.float32)
            whole = tensors.get(f"{module}.weight_global_scale")
            scale = torch.exp2(scale - 127) if whole is None else scale / whole
        each = codes.shape[1] // scale.shape[1]
        wide = [t.float().repeat_interleave(each, 1) for t in (scale, zero) if t is not None]
        shift = wide[1] if zero is not None else 0
        yield module, ((codes.float() - shift) * wide[0]).numpy()


def modelopt(bases: Path, out: Path) -> None:
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    cases = {"modelopt_nvfp4": mtq.NVFP4_DEFAULT_CFG, "modelopt_fp8": mtq.FP8_DEFAULT_CFG}
    for name, config in cases.items():
        model = AutoModelForCausalLM.from_pretrained(bases / "llama", dtype=torch.float16)
        mtq.quantize(model, config, lambda model: model(torch.tensor(CALIBRATION)))
        export_hf_checkpoint(model, dtype=torch.float16, export_dir=out / name)
        keep(bases / "llama", name, out / name, scaled(out / name))


def quark(bases: Path, out: Path) -> None:
    import torch
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.quantization.config import config
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bases / "llama", dtype=torch.float16)
    kind = config.FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False)
    every = config.QLayerConfig(weight=kind.to_quantization_spec())
    quantizer = ModelQuantizer(config.QConfig(global_quant_config=every, exclude=["lm_head"]))
    model = quantizer.freeze(quantizer.quantize_model(model, [torch.tensor(CALIBRATION)]))
    export_safetensors(model, str(out / "quark_fp8"))
    keep(bases / "llama", "quark_fp8", out / "quark_fp8", scaled(out / "quark_fp8"))


def scaled(folder: Path) -> Matrices:
    """Matrices of modelopt and Quark by the definitions of their layouts."""
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    tensors = stored(folder)
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        if leaf != "weight_scale":
            continue
        codes, scale = tensors[f"{module}.weight"], tensors[name]
        if codes.dtype == np.uint8:
            pairs = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
            codes = np.concatenate([e2m1, -e2m1])[pairs]
            scale = np.repeat(scale * tensors[f"{module}.weight_scale_2"], 16, 1)
        yield module, codes * scale


def gptqmodel(bases: Path, out: Path) -> None:
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig

    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "gptqmodel_4_desc_act": ("qwen3", {"bits": 4, "desc_act": True, "sym": True}),
        "gptqmodel_4_v2": ("llama", {"bits": 4, "sym": False, "format": "gptq_v2"}),
        "gptqmodel_3": ("llama", {"bits": 3, "sym": True}),
        "gptqmodel_mixtral": ("mixtral", {"bits": 4, "sym": True}),
    }
    texts = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in CALIBRATION]
    for name, (base, stated) in cases.items():
        config = QuantizeConfig(**{"group_size": 32, "desc_act": False, "device": "cpu", **stated})
        model = GPTQModel.load(str(bases / base), config, dtype=torch.float16)
        model.quantize(texts, batch_size=1)
        model.save(str(out / name))
        keep(bases / base, name, out / name, packed_outputs_last(out / name))


def auto_round(bases: Path, out: Path) -> None:
    import torch
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "auto_round_2": ("auto_round", {"scheme": "W2A16", "group_size": 32}),
        "auto_round_awq": ("auto_awq", {"scheme": "W4A16", "group_size": 32, "sym": False}),
    }
    for name, (format, stated) in cases.items():
        base = bases / "llama"
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float16)
        texts = list(torch.tensor(CALIBRATION))
        quantizer = AutoRound(
            model, AutoTokenizer.from_pretrained(base), iters=0, dataset=texts,
            nsamples=len(texts), seqlen=64, device_map="cpu", disable_opt_rtn=True, **stated,
        )  # fmt: skip
        quantizer.quantize_and_save(str(out / name), format=format)
        (written,) = (out / name).iterdir()
        keep(base, name, written, packed_outputs_last(written))


def autoawq(bases: Path, out: Path) -> None:
    from awq import AutoAWQForCausalLM
    from transformers import AutoTokenizer

    base, name = str(bases / "llama_mha"), "autoawq_4"
    model = AutoAWQForCausalLM.from_pretrained(base, device_map="cpu")
    stated = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    texts = [" ".join(map(str, ids)) for ids in CALIBRATION]
    tokenizer = AutoTokenizer.from_pretrained(base)
    model.quantize(tokenizer, quant_config=stated, calib_data=texts, max_calib_seq_len=128)
    model.save_quantized(str(out / name))
    keep(Path(base), name, out / name, packed_outputs_last(out / name))


def packed_outputs_last(folder: Path) -> Matrices:
    """Matrices of GPTQ and AWQ by the definitions of their layouts."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    bits, group, is_awq = config["bits"], config["group_size"], config["quant_method"] == "awq"
    is_first = config.get("checkpoint_format", "gptq") == "gptq"
    tensors = stored(folder)
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        if leaf != "qweight":
            continue
        words, scales = tensors[name], tensors[f"{module}.scales"]
        zeros = stream(tensors[f"{module}.qzeros"], bits)
        if is_awq:
            order = np.arange(scales.shape[1]).reshape(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].ravel()
            codes, zeros = stream(words, bits)[:, order], zeros[:, order]
        else:
            codes = stream(words.T, bits).T
            zeros = zeros + 1 & (1 << bits) - 1 if is_first else zeros
        of = tensors.get(f"{module}.g_idx", np.arange(len(codes)) // group)
        yield module, ((codes - zeros[of].astype(np.float32)) * scales[of]).T.copy()


def stream(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes of rows of words, the lowest bits first."""
    each = words.copy().view(np.uint32)[..., None] >> np.arange(32, dtype=np.uint32) & 1
    codes = each.reshape(len(words), -1, bits)
    return (codes << np.arange(bits, dtype=np.uint32)).sum(-1).astype(np.int64)


def torchao(bases: Path, out: Path) -> None:
    import torch
    import torchao.quantization as q
    from transformers import AutoModelForCausalLM, TorchAoConfig

    cases: dict[str, Any] = {
        "torchao_int8": q.Int8WeightOnlyConfig(),
        "torchao_int4": q.IntxWeightOnlyConfig(torch.int4, q.PerGroup(32)),
        "torchao_fp8": q.Float8WeightOnlyConfig(),
    }
    for name, config in cases.items():
        model = AutoModelForCausalLM.from_pretrained(
            bases / "llama", quantization_config=TorchAoConfig(config), dtype=torch.float16
        )
        matrices = (
            (module, _without_rounding(each.weight))
            for module, each in model.named_modules()
            if hasattr(getattr(each, "weight", None), "qdata")
        )
        model.save_pretrained(out / name)
        keep(bases / "llama", name, out / name, matrices)


def _without_rounding(weight: Any) -> np.ndarray:
    """What torchao's own function gives, which rounds it to the model's type."""
    scale, zero = weight.scale.float(), getattr(weight, "zero_point", None)
    each = weight.shape[1] // scale.shape[1]
    whole = weight.qdata.float()
    if zero is not None:
        whole = whole - zero.float().repeat_interleave(each, 1)
    whole = whole * scale.repeat_interleave(each, 1)
    assert (whole - weight.dequantize().float()).abs().max() <= whole.abs().max() / 1024
    result: np.ndarray = whole.numpy()
    return result


def quanto(bases: Path, out: Path) -> None:
    import torch
    from optimum.quanto import QuantizedModelForCausalLM, qfloat8, qint8
    from transformers import AutoModelForCausalLM

    for name, kind in {"quanto_int8": qint8, "quanto_fp8": qfloat8}.items():
        model = AutoModelForCausalLM.from_pretrained(bases / "llama", dtype=torch.float16)
        quantized = QuantizedModelForCausalLM.quantize(model, weights=kind, exclude="lm_head")
        matrices = (
            (module, (each.weight._data.float() * each.weight._scale.float()).numpy())
            for module, each in model.named_modules()
            if hasattr(getattr(each, "weight", None), "_scale")
        )
        quantized.save_pretrained(out / name)
        keep(bases / "llama", name, out / name, matrices)


WRITERS: tuple[Callable[[Path, Path], None], ...]
WRITERS = (bitsandbytes, hqq, mlx, llmcompressor, modelopt, quark, gptqmodel, autoawq, auto_round)
WRITERS += (torchao, quanto)

if __name__ == "__main__":
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else "bases").resolve()
    if not folder.exists():
        make_bases(folder)
    written = folder / f"by_{sys.argv[1]}"
    shutil.rmtree(written, ignore_errors=True)
    written.mkdir()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    {each.__name__: each for each in WRITERS}[sys.argv[1]](folder, written)
