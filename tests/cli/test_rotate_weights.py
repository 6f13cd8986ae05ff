"""The turned model is the same function with other weights."""

from pathlib import Path

import numpy as np
import pytest

from jinfer import LLM
from jinfer.cli.quantize.rotate_weights import main, orthogonal
from jinfer.loader.checkpoint import open_checkpoint
from jinfer.quant import QuantizedTensor
from tools.bench_models import LlamaShape, convert, make_up

SOURCE = next((Path(__file__).parents[1] / "goldens" / "gguf_llama2").glob("*.gguf"))
IDS = [1, 5, 9, 2, 40, 7, 3]


def test_logits_stay_and_weights_do_not(tmp_path: Path) -> None:
    out = tmp_path / "turned.gguf"
    assert main([str(SOURCE), str(out), "--type", "F32", "--seed", "3"]) == 0
    ours = LLM(out, dtype="float32").logits([IDS])[0]
    expected = LLM(SOURCE, dtype="float32").logits([IDS])[0]
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    name = "blk.0.attn_q.weight"
    before, after = (open_checkpoint(path).tensors[name].read() for path in (SOURCE, out))
    assert not np.allclose(before, after, atol=1e-3)


def test_the_matrix_is_orthogonal() -> None:
    turn = orthogonal(20, 0)
    np.testing.assert_allclose(turn @ turn.T, np.eye(20), atol=1e-12)


def test_other_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = next((SOURCE.parents[1] / "gguf_gpt2").glob("*.gguf"))
    assert main([str(other), str(tmp_path / "out.gguf")]) == 2
    assert "is no tensor of a model with RMS norms" in capsys.readouterr().err


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "model.gguf"
    own.write_bytes(SOURCE.read_bytes())
    assert main([str(own), str(own)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert own.read_bytes() == SOURCE.read_bytes()
    assert main([str(own), str(tmp_path / "new" / "out.gguf")]) == 0


def test_made_up_and_converted_models_load(tmp_path: Path) -> None:
    made, converted = tmp_path / "made.gguf", tmp_path / "converted.gguf"
    make_up(LlamaShape(2, 64, 4, 2, 96), SOURCE, made, "Q4_0")
    convert(made, converted, "Q8_0")
    for path, kind in ((made, "q4_sym"), (converted, "q8")):
        llm = LLM(path)
        leaves = llm._engine.runner.parameters
        formats = {leaf.format.name for leaf in leaves if isinstance(leaf, QuantizedTensor)}
        assert formats == {kind}
        assert np.isfinite(llm.logits([IDS])[0]).all()
