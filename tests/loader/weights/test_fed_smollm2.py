"""What GPTQ is worth on a real model, taken off the grid of its file."""

from pathlib import Path
from typing import Any

import pytest

from jinfer import LLM
from jinfer.cli.perplexity import perplexity, text_windows
from jinfer.cli.quantize.rotate_weights import main as rotate
from jinfer.loader.weights import quantized_cache

ROOT = Path(__file__).parents[3]
PAGES = ("engine", "serving", "sampling")  # which the model has not read


@pytest.mark.soak
@pytest.mark.parametrize(("weights", "left"), [("q4", 0.4), ("q3", 0.25)])
def test_gptq_recovers_most_of_the_search_loss(
    weights: str, left: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the perplexity that quantizing with a search adds, no more than a share is left."""
    monkeypatch.setattr(quantized_cache, "cache_folder", lambda name: tmp_path / "kept")
    model = tmp_path / "model.gguf"
    assert rotate([str(ROOT / "specs" / "smollm2_135m_instruct.toml"), str(model)]) == 0
    text = "\n".join((ROOT / "docs" / f"{page}.md").read_text("utf-8") for page in PAGES)

    def measured(**quantization: Any) -> float:
        llm = LLM(model, engine={"context": 512}, quantization=quantization)
        return perplexity(llm, text_windows(llm, text, 512, None, "halves")[:16]).value

    plain = measured(weights="plain")
    searched, fed = (measured(weights=weights, method=each) for each in ("mse", "gptq"))
    assert fed - plain < left * (searched - plain)
