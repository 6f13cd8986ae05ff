"""`jinfer look`: pictures in files, and errors in a line."""

from pathlib import Path

import pytest

from jinfer.look import main

LLAMA = Path(__file__).parents[1] / "goldens" / "llama2"
REFUSED = [
    (["--view", "lens"], "--view lens needs a text: --prompt TEXT, --prompt-file FILE, or --ids"),
    (["--view", "memory", "--layer", "1"], "--layer is for --view patterns, not memory"),
    (["--view", "memory", "--strategies", "beam"], "--strategies is for --view strategies, not"),
    (["--prompt", "a", "--out", "x.png"], "--out x.png: a view is a page or an image; end it in"),
    (["--prompt", "a", "--prompt-file", "b"], "--prompt and --prompt-file each give the text"),
    (["--ids", "5", "--chat"], "--chat makes a text a message, and --ids are tokens"),
    (["--ids", "five"], "--ids 'five': write token ids, such as --ids '1 15043'"),
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
    assert main([str(LLAMA), "--ids", "5 9 2 77", "--top", "2", "--out", "tokens.svg"]) == 0
    assert "tokens.svg: tokens by log-probability, 4 tokens; " in capsys.readouterr().out
