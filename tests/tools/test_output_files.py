"""tools.output_files: what cannot be written is a line, before any work."""

import os
from pathlib import Path
from types import ModuleType

import pytest

from jinfer.loader.sources import SourceError
from tools import (
    bench_cpu,
    bench_engine,
    bench_lora,
    bench_partition,
    bench_serve,
    bench_speculate,
    inspect,
    perplexity,
    quantize,
)
from tools.output_files import check_writable

TOOLS = {
    bench_cpu: (["a"], "--json"),
    bench_engine: (["a"], "--svg"),
    bench_lora: (["a"], "--json"),
    bench_partition: (["a"], "--svg"),
    bench_serve: (["http://127.0.0.1:9"], "--json"),
    bench_speculate: (["a"], "--svg"),
    inspect: (["a"], "--html"),
    perplexity: (["a", "--text", "b"], "--json"),
    quantize: (["a", "b"], "--json"),
}


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__.rpartition(".")[2])
def test_a_missing_folder_comes_first(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the source, which is not there either."""
    arguments, flag = TOOLS[tool]
    file = tmp_path / "no" / "figures.svg"
    assert tool.main([*arguments, flag, str(file)]) == 2
    said = capsys.readouterr().err
    assert said == f"error: {file}: there is no folder {file.parent}; make it first\n"


def test_what_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    check_writable(file)
    file.touch()
    check_writable(file)
    with pytest.raises(SourceError, match="is a folder; name a file in it"):
        check_writable(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: path != file)
    check_writable(tmp_path / "b.json")
    with pytest.raises(SourceError, match=r"a\.json: may not be written by this user"):
        check_writable(file)
