"""tools.bench_models: what it writes has one type in all matrices; what it refuses is one line."""

from pathlib import Path

import numpy as np
import pytest

from jinfer import LLM
from jinfer.loader.checkpoint import open_checkpoint
from tools import bench_models
from tools.bench_models import LlamaShape, Qwen3MoeShape, main, make_up

GOLDENS = Path(__file__).parents[1] / "goldens"
SOURCE = str(GOLDENS / "gguf_llama2" / "model.gguf")


def test_real_weights_in_another_type(tmp_path: Path) -> None:
    source, out = tmp_path / "made.gguf", tmp_path / "q8.gguf"
    make_up(LlamaShape(1, 64, 4, 2, 96), Path(SOURCE), source, "F16")
    assert main([str(out), "--source", str(source), "--type", "Q8_0"]) == 0
    before, after = open_checkpoint(source).tensors, open_checkpoint(out).tensors
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert tensor.type == ("F32" if len(tensor.shape) == 1 else "Q8_0")
        expected = before[name].read().astype(np.float32)
        np.testing.assert_allclose(tensor.read(), expected, atol=np.abs(expected).max() / 100)


def test_made_up_weights_of_a_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_models.SHAPES, "1.1b", LlamaShape(2, 64, 4, 2, 96))
    out = tmp_path / "made.gguf"
    assert main([str(out), "--shape", "1.1b", "--tokenizer", SOURCE]) == 0
    tensors = open_checkpoint(out).tensors
    assert tensors["blk.1.ffn_up.weight"].shape == (96, 64)
    assert {tensor.type for tensor in tensors.values()} == {"F32", "Q4_0"}


def test_made_up_experts_answer(tmp_path: Path) -> None:
    """The family reads the names, shapes and types that are written; the router is not rounded."""
    out = tmp_path / "made.gguf"
    shape = Qwen3MoeShape(1, 64, 4, 2, 32, head=32, experts=4, used=2)
    make_up(shape, Path(SOURCE), out, "Q4_0")
    tensors = open_checkpoint(out).tensors
    assert tensors["blk.0.ffn_down_exps.weight"].shape == (4, 64, 32)
    assert tensors["blk.0.ffn_down_exps.weight"].type == "Q4_0"
    assert tensors["blk.0.ffn_gate_inp.weight"].type == "F32"
    with LLM(out) as llm:
        (logits,) = llm.logits([[1, 2, 3]])
    assert np.isfinite(logits).all()
    assert logits.std() > 0.1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--source", str(GOLDENS / "llama2")], "llama2: is no GGUF file"),
        (["--source", "nowhere.gguf"], "nowhere.gguf: there is no such file"),
        (["--source", SOURCE, "--tokenizer", SOURCE], "--tokenizer goes with --shape"),
    ],
)
def test_what_is_refused(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "out.gguf"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert words in error
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "no" / "out.gguf"
    assert main([str(out), "--source", "nowhere.gguf"]) == 2
    said = f"error: {out}: there is no folder {out.parent}; make it first\n"
    assert capsys.readouterr().err == said


def test_rows_that_are_no_whole_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / "odd.gguf"
    monkeypatch.setitem(bench_models.SHAPES, "1.1b", LlamaShape(1, 48, 4, 2, 96))
    assert main([str(odd), "--shape", "1.1b", "--tokenizer", SOURCE, "--type", "F16"]) == 0
    assert main([str(tmp_path / "out.gguf"), "--source", str(odd), "--type", "Q4_0"]) == 2
    assert "rows of 48 are no whole blocks of Q4_0" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["odd.gguf"]


def test_one_of_two_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--source", SOURCE, "--shape", "8b"]):
        with pytest.raises(SystemExit) as ended:
            main([str(tmp_path / "out.gguf"), *arguments])
        assert ended.value.code == 2
    assert "--shape" in capsys.readouterr().err
