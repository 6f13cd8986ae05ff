"""Makes the adapters in peft/ with PEFT itself, of some of the goldens.

In an environment of Python 3.11 (`pip install torch==2.13.0 transformers peft`), on a CPU:

    python tests/engine/make_peft.py [CASE ...]

Made with peft 0.21.2, `old_*` with peft 0.18.1, and transformers 5.24.0. `expected.npz` has logits
of PEFT's own forward pass, in float32, and those without the adapter.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).parents[1]
IDS = [1, 5, 9, 40, 3, 7, 58, 61, 17, 100, 30, 12]
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "target_modules": ["q_proj", "o_proj"]}),
    "mixtral": (
        "mixtral",
        {**EXPERTS, "rank_pattern": {r".*\.gate_up_proj": 3}, "use_rslora": True},
    ),
    "gpt_oss": ("gpt_oss", EXPERTS),
    "old_qwen3_moe": ("qwen3_moe", EXPERTS),
    "old_mixtral": ("mixtral", EXPERTS),
    "dora_qwen15": ("qwen15", {"target_modules": "all-linear", "use_dora": True}),
}


def make(name: str) -> None:
    """One case."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    golden, keys = CASES[name]
    given = {"r": 2, "lora_alpha": 3, "target_modules": [], **keys}
    folder = TESTS / "goldens" / golden
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([IDS])
    with torch.no_grad():
        plain = model(ids).logits[0].numpy()
        model = get_peft_model(model, LoraConfig(**given)).eval()
        torch.manual_seed(7)
        for each, parameter in model.named_parameters():
            if "lora_magnitude" in each:
                parameter.mul_(torch.empty_like(parameter).uniform_(0.7, 1.3))
            elif "lora_" in each:
                parameter.normal_(0, 0.15)
        logits = model(ids).logits[0].numpy()
    out = TESTS / "engine" / "peft" / name
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out)
    (out / "README.md").unlink()
    said = (out / "adapter_config.json").read_text()
    (out / "adapter_config.json").write_text(said.replace(str(folder), golden))
    np.savez_compressed(out / "expected.npz", input_ids=IDS, logits=logits, plain=plain)
    print(name, np.abs(logits - plain).max(), sum(f.stat().st_size for f in out.iterdir()))


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        make(case)
