"""`jinfer look`: pictures in files, and errors in a line."""

from pathlib import Path

import pytest

from tools.look import main

LLAMA = Path(__file__).parents[1] / "goldens" / "llama2"
REFUSED = [
    (["--view", "lens"], "--view lens needs a text: --prompt TEXT, or --prompt-file FILE"),
    (["--view", "memory", "--layer", "1"], "--layer is for --view patterns, not memory"),
    (["--view", "memory", "--strategies", "beam"], "--strategies is for --view strategies, not"),
    (["--prompt", "a", "--out", "x.png"], "--out x.png: a view is a page or an image; end it in"),
    (["--prompt", "a", "--prompt-file", "b"], "--prompt and --prompt-file both give the text"),
    (["--prompt", "a", "--out", "no/x.svg"], "no/x.svg: there is no folder"),
    (["--prompt-file", "missing.txt"], "missing.txt: No such file or directory"),
    (["--prompt", "a", "--view", "tokens"], "the checkpoint has no tokenizer"),
]


@pytest.mark.parametrize(("flags", "said"), REFUSED, ids=[said[:20] for _, said in REFUSED])
def test_what_cannot_be_is_a_line(
    flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main([str(LLAMA), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert list(tmp_path.iterdir()) == []


def test_a_view_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(LLAMA), "--view", "memory", "--set", "dtype=float32"]) == 0
    assert capsys.readouterr().out.startswith("memory.html: memory, weights ")
    assert "<title>memory</title>" in Path("memory.html").read_text("utf-8")
