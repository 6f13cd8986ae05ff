"""Adapters that PEFT wrote, against PEFT's own logits: see make_peft.py."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfer import LLM
from jinfer.api.user_errors import USER_ERRORS
from tests.engine.adapters import write_adapter

HERE, GOLDENS = Path(__file__).parent / "peft", Path(__file__).parents[1] / "goldens"


def expected(name: str) -> tuple[list[int], np.ndarray, np.ndarray]:
    """The tokens, PEFT's logits, and those without the adapter."""
    with np.load(HERE / name / "expected.npz") as arrays:
        ids = arrays["input_ids"].tolist()
        return ids, arrays["logits"], arrays["plain"]


def opened(name: str, **keys: Any) -> LLM:
    golden = GOLDENS / name.removeprefix("old_").removeprefix("dora_")
    return LLM(golden, **{"dtype": "float32", "engine.slots": 2, **keys})


EXPERTS = ["qwen3_moe", "mixtral", "gpt_oss", "old_qwen3_moe", "old_mixtral"]


@pytest.mark.parametrize("name", [*EXPERTS, "dora_qwen15"])
def test_merged(name: str) -> None:
    ids, wanted, _ = expected(name)
    with opened(name, adapters={"a": {"source": str(HERE / name), "merge": True}}) as llm:
        np.testing.assert_allclose(llm.logits([ids])[0], wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", [*EXPERTS, "dora_qwen15"])
def test_beside(name: str) -> None:
    ids, wanted, plain = expected(name)
    with opened(name, adapters={"a": str(HERE / name)}) as llm:
        for adapter, logits in (("a", wanted), (None, plain)):
            found = llm.trace(ids, "logits", adapter=adapter)["logits"]
            np.testing.assert_allclose(found, logits, rtol=0, atol=2e-4)


KEYS: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "logprobs": 3}
PROMPTS = [[1, 5, 9], [7, 8, 2, 60, 44], [3, 3, 12, 9], [100, 20, 31]]
WITH = ("stacks", None, "each", "stacks")


def answer(llm: LLM, prompt: list[int], adapter: str | None) -> tuple[Any, ...]:
    (one,) = llm.generate([prompt], adapter=adapter, **KEYS)
    assert one.logprobs is not None
    return one.token_ids, [[top.logprob for top in each.top] for each in one.logprobs]


def test_experts_of_several_adapters_in_one_batch(tmp_path: Path) -> None:
    """Of stacks, and of single experts, of which one is left out; over quantized weights.

    In slots they are in int8.
    """
    base, targets = GOLDENS / "mixtral", ("w1", "w2", "w3", "q_proj")
    each = write_adapter(tmp_path / "each", 4, 1, targets=targets, base=base)
    tensors = load_file(each / "adapter_model.safetensors")
    tensors = {name: values for name, values in tensors.items() if ".experts.2." not in name}
    save_file(tensors, each / "adapter_model.safetensors")
    quantized = {"quantization.weights": "q8", "quantization.threshold": 0}
    quantized |= {"engine.adapter_dtype": "int8"}
    adapters = {"stacks": str(HERE / "mixtral"), "each": str(each)}
    with opened("mixtral", **{"engine.slots": 4}, adapters=adapters, **quantized) as llm:
        with ThreadPoolExecutor(4) as pool:
            mixed = list(pool.map(lambda i: answer(llm, PROMPTS[i], WITH[i]), range(4)))
        for prompt, name, found in zip(PROMPTS, WITH, mixed, strict=True):
            assert found == answer(llm, prompt, name)
        logits = llm.trace(PROMPTS[2], "logits", adapter="each")["logits"]
    with opened("mixtral", **{"engine.slots": 4}, **quantized) as plain:
        for prompt, name, found in zip(PROMPTS, WITH, mixed, strict=True):
            assert (found == answer(plain, prompt, None)) == (name is None)
    merge = {"each": {"source": str(each), "merge": True}}
    with opened("mixtral", adapters=merge, dtype="float32") as llm:
        near = np.abs(llm.logits([PROMPTS[2]])[0] - logits)
    assert near.mean() < 0.1  # of 8 bits


def test_room_and_misfits(tmp_path: Path) -> None:
    def changed(name: str, **config: Any) -> Path:
        path = tmp_path / name
        shutil.copytree(HERE / "mixtral", path)
        said = json.loads((path / "adapter_config.json").read_text()) | config
        (path / "adapter_config.json").write_text(json.dumps(said))
        return path

    one = {"target_parameters": ["experts.down_proj"]}
    cases = [
        (HERE / "old_qwen3_moe", "down_proj is for 6 matrices [40, 64], and decoder.0.ffn."),
        (changed("a", **one), "experts has 2 lora_A, and target_parameters names 1 of its"),
        (changed("b", rank_pattern={}, r=5), "12 rows in lora_A, which is no number of experts"),
        (changed("c", target_parameters="x"), "target_parameters is 'x', not a list of names"),
        (changed("d", target_parameters=["mlp.w1"]), "target_parameters has 'mlp.w1'; of para"),
    ]
    for room in (True, False):
        keys = {"engine.max_adapters": 1, "engine.expert_adapters": room}
        with opened("mixtral", **keys) as llm:
            for path, said in cases if room else [(HERE / "mixtral", "set engine.expert_adapters")]:
                with pytest.raises(USER_ERRORS) as caught:
                    llm.load_adapter("a", path)
                assert said in str(caught.value)
                assert "\n" not in str(caught.value)


def test_dora_and_lora_in_one_batch(tmp_path: Path) -> None:
    """Those of LoRA, and of none, have the bits of a model that has no room for magnitudes."""
    base = GOLDENS / "qwen15"
    targets = ("q_proj", "k_proj", "down_proj")
    lora = write_adapter(tmp_path / "l", 4, 1, targets=targets, base=base)
    dora = write_adapter(tmp_path / "d", 4, 2, targets=targets, base=base, dora=True)
    both = {"lora": str(lora), "peft": str(HERE / "dora_qwen15"), "dora": str(dora)}
    names = ("dora", "lora", None, "peft")
    quantized = {"quantization.weights": "q8", "quantization.threshold": 0, "engine.slots": 4}
    with opened("qwen15", adapters=both, **quantized) as llm:
        with ThreadPoolExecutor(4) as pool:
            mixed = list(pool.map(lambda i: answer(llm, PROMPTS[i], names[i]), range(4)))
        for prompt, name, found in zip(PROMPTS, names, mixed, strict=True):
            assert found == answer(llm, prompt, name)
        llm.unload_adapter("dora")
        llm.load_adapter("other", lora)  # in its slot, of which nothing is left
        assert answer(llm, PROMPTS[1], "other") == mixed[1]
        logits = llm.trace(PROMPTS[3], "logits", adapter="peft")["logits"]
    with opened("qwen15", adapters={"lora": str(lora)}, **quantized) as plain:
        known = {"lora": "lora", "dora": None, "peft": None, None: None}
        for prompt, name, found in zip(PROMPTS, names, mixed, strict=True):
            same = found == answer(plain, prompt, known[name])
            assert same == (name in ("lora", None))
    merge = {"peft": {"source": str(HERE / "dora_qwen15"), "merge": True}}
    with opened("qwen15", adapters=merge) as llm:
        assert np.abs(llm.logits([PROMPTS[3]])[0] - logits).mean() < 0.1  # of 8 bits


def test_broken_magnitudes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    shutil.copytree(HERE / "dora_qwen15", path)
    tensors = load_file(path / "adapter_model.safetensors")
    name = next(name for name in tensors if name.endswith("lora_magnitude_vector"))
    with opened("qwen15", **{"engine.max_adapters": 1, "engine.dora_adapters": True}) as llm:
        for values in (tensors[name][:-1], tensors[name] * np.nan):
            save_file(tensors | {name: values}, path / "adapter_model.safetensors")
            with pytest.raises(USER_ERRORS, match=r"are no finite lengths of \d+ rows"):
                llm.load_adapter("a", path)
