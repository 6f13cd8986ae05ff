"""jinfer.cli.run_command: what cannot be written is a line, before any work."""

import os
from pathlib import Path
from types import ModuleType

import pytest

from jinfer.cli import perplexity
from jinfer.cli.bench import bench_cpu, bench_engine, bench_serve, bench_speculate
from jinfer.cli.inspect import inspect_checkpoint
from jinfer.cli.quantize import quantize_checkpoint
from jinfer.cli.run_command import check_writable
from jinfer.loader.config.source_errors import SourceError

COMMANDS = {
    bench_cpu: (["a"], "--json"),
    bench_engine: (["a"], "--svg"),
    bench_serve: (["http://127.0.0.1:9"], "--json"),
    bench_speculate: (["a"], "--svg"),
    inspect_checkpoint: (["a"], "--html"),
    perplexity: (["a", "--text", "b"], "--json"),
    quantize_checkpoint: (["a", "b"], "--json"),
}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda item: item.__name__)
def test_a_missing_folder_comes_first(
    command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the source, which is not there either."""
    arguments, flag = COMMANDS[command]
    file = tmp_path / "no" / "figures.svg"
    assert command.main([*arguments, flag, str(file)]) == 2
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
