"""Perplexity: which tokens count, and that a token's score is what the logits say."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jinfer import LLM, RequestError
from jinfer.cli.perplexity import Window, main, perplexity, summary, windows

GOLDENS = Path(__file__).parents[1] / "goldens"
IDS = [1, 5, 9, 2, 40, 7, 3, 11, 8, 60]


@pytest.fixture(scope="module")
def llm() -> LLM:
    keys: dict[str, Any] = {"dtype": "float32", "engine.prefill_chunk": 16}
    return LLM(GOLDENS / "llama2", **keys)


def test_llama_cpp_counts_second_halves_and_begins_each_window_with_bos() -> None:
    found = list(windows(list(range(10, 22)), 4, 4, "halves", 1))
    assert found == [
        Window((1, 11, 12, 13), 3), Window((1, 15, 16, 17), 3), Window((1, 19, 20, 21), 3)
    ]  # fmt: skip
    assert next(windows(list(range(10, 22)), 4, 4, "halves", None)).ids == (10, 11, 12, 13)
    assert len(list(windows(list(range(11)), 4, 4, "halves", None))) == 2  # the rest is dropped


def test_inferflow_counts_all_but_the_first_of_overlapping_windows() -> None:
    found = list(windows(list(range(7)), 4, 3, "whole", None))
    assert found == [Window((0, 1, 2, 3), 1), Window((3, 4, 5, 6), 1)]


@pytest.mark.parametrize("length", [2, 10, 37])
def test_scores_are_log_probabilities_of_the_logits(llm: LLM, length: int) -> None:
    ids = (IDS * 4)[:length]
    logprobs = np.asarray(jax.nn.log_softmax(llm.logits([ids])[0], axis=-1))
    expected = logprobs[np.arange(length - 1), ids[1:]]
    np.testing.assert_allclose(llm.score([ids])[0], expected, atol=2e-5)


def test_one_token_has_no_score(llm: LLM) -> None:
    with pytest.raises(RequestError, match="at least two tokens"):
        llm.score([[1]])


def test_the_value_is_the_exponential_of_the_mean(llm: LLM) -> None:
    parts = [Window(tuple(IDS), 5), Window(tuple(IDS[::-1]), 5)]
    losses = -np.concatenate([llm.score([part.ids])[0][4:] for part in parts])
    found = perplexity(llm, parts)
    assert found.tokens == 10
    assert found.value == pytest.approx(np.exp(losses.mean()), rel=1e-6)
    deviation = losses.std(ddof=1) / np.sqrt(10)
    assert found.error == pytest.approx(found.value * deviation, rel=1e-4)
    assert summary(np.zeros(3, np.float32), 1).value == 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    source = str(GOLDENS / "tok_spm_bpe")
    assert main([source, "--text", str(text)]) == 2  # only a tokenizer
    assert main([str(GOLDENS / "llama2"), "--text", str(tmp_path / "none")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all(line.startswith("error: ") for line in errors)
    story = ["--text", str(text), "--length", "16", "--windows", "3", "--json", str(out)]
    spec = Path(__file__).parents[2] / "specs" / "smollm2_135m_instruct.toml"
    assert main([str(spec), *story]) == 0
    report = json.loads(out.read_text())
    assert report["tokens"] == 3 * 7
    assert 1 < report["value"] < 1000
    assert f"perplexity {report['value']:.4f}" in capsys.readouterr().out
