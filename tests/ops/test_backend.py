"""A platform that JAX does not find is one line, in all commands and in Python."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jinfer.ops import backend
from jinfer.ops.disable_kernels import SwitchError

ROOT = Path(__file__).parents[2]
LLAMA2 = str(ROOT / "tests" / "goldens" / "llama2")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is a GPU")
@pytest.mark.parametrize("command", [["generate", LLAMA2, "--ids", "1"], ["quantize", LLAMA2, "o"]])
def test_missing_platform_is_reported_in_one_line(command: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jinfer", *command],
        env={**os.environ, "JAX_PLATFORMS": "cuda", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("error: JAX_PLATFORMS=cuda: JAX finds no cuda here; for NVIDIA's")


@pytest.mark.parametrize(
    ("requested", "words"),
    [
        ("gpu", "JAX finds no gpu here; for NVIDIA's GPUs: pip install 'jinfer[cuda]'"),
        ("rocm,cuda", "JAX finds no rocm here"),
        ("cdua", "JAX knows no platform 'cdua'; did you mean 'cuda'? there are: cpu, cuda"),
    ],
)
@pytest.mark.parametrize("kind", [RuntimeError, AssertionError])
def test_error_text_of_each_platform(
    requested: str, words: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise kind("Unable to initialize backend")

    monkeypatch.setattr("jax.local_devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", requested)
    with pytest.raises(SwitchError) as caught:
        backend.start()
    assert str(caught.value).startswith(f"JAX_PLATFORMS={requested}: {words}")
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(kind, match="Unable"):
        backend.start()
