"""tools.bench_cpu: medians of the rounds' ratios, and one-line errors; speed itself is no test."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools import bench_cpu
from tools.bench_cpu import main, table

MODEL = Path(__file__).parents[1] / "goldens" / "gguf_llama2" / "model.gguf"


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    found = bench_cpu._summary({"llama.cpp": [1.0, 2.0, 10.0], "jinfer": [2.0, 6.0, 11.0]})
    assert found == {"llama.cpp": 2, "jinfer": 6, "ratio": 2, "least": 1.1, "most": 3}
    both = {"llama.cpp": {"seconds": 1.0, "rss": 10.0}, "jinfer": {"seconds": 3.0, "rss": 5.0}}
    result = {"model": "a/b.gguf", "started": both, "memory": both, "tasks": {"decode 1": found}}
    lines = table([result]).splitlines()
    assert "| decode 1 | 2.0 | 6.0 | 2.00 (1.10-3.00) |" in lines
    assert "| start to first token, s | 1.00 | 3.00 | 3.00 |" in lines
    assert "| peak memory, MiB | 10.00 | 5.00 | 0.50 |" in lines


@pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="this Python has the peer")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.gguf"], "nowhere.gguf: there is no such file"),
        (
            [str(MODEL), "--peer-python", sys.executable],
            "--peer-python has to name a Python with llama-cpp-python",
        ),
    ],
)
def test_what_is_refused(
    arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    errors = capfd.readouterr().err.splitlines()
    assert words in errors[-1]
    assert all(line.startswith("error: ") for line in errors)
