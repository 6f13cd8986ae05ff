"""The worked example of docs/specs.md, followed as a newcomer would: its outputs are real."""

import json
import re
import runpy
import shutil
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pytest

import jinfer.modelspec.spec_files
from jinfer import LLM
from jinfer.cli.inspect.inspect_checkpoint import main
from jinfer.modelspec.spec_files import specs_folder

from .families import gptj
from .families.tiny import close

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "specs.md").read_text(encoding="utf-8")
_, _, EXAMPLE = PAGE.partition("## From a checkpoint to a specification\n")
EXAMPLE, _, HYBRID = EXAMPLE.partition("## A hybrid, from its checkpoint to equal logits\n")


def blocks(language: str, text: str = EXAMPLE) -> list[str]:
    """The example's blocks in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def sessions(text: str = EXAMPLE) -> list[tuple[str, str]]:
    """Every command of the example, and what it prints."""
    blocks_of = blocks("console", text)
    parts = [re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE) for block in blocks_of]
    return [pair for part in parts for pair in zip(part[1::2], part[2::2], strict=True)]


(SCRIPT,) = (block for block in blocks("python") if "from jinfer" in block)
(FAMILY,) = blocks("toml")
(COMPARED,) = blocks("python", HYBRID)


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the checkpoint is, with a folder of specifications that knows no GPT-J."""
    shutil.copytree(specs_folder(), tmp_path / "specs")
    (tmp_path / "specs" / "families" / "gptj.toml").unlink()
    monkeypatch.setattr(jinfer.modelspec.spec_files, "specs_folder", lambda: tmp_path / "specs")
    monkeypatch.chdir(tmp_path)
    gptj.write(Path("gptj"))
    return tmp_path


def printed(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command of the page prints."""
    program, _, rest = command.partition(" ")
    if program == "jinfer":
        assert main(rest.removeprefix("inspect ").split()) == 0
    elif program == "python":
        runpy.run_path(rest)
    else:
        assert program in ("tail", "grep")
        return subprocess.run(command.split(), capture_output=True, text=True, check=True).stdout
    return capsys.readouterr().out


def test_the_checkpoint_is_the_one_of_the_page(newcomer: Path) -> None:
    (config,) = blocks("json")
    assert json.loads(config) == gptj.CONFIG == json.loads(Path("gptj/config.json").read_text())


def test_every_command_prints_what_the_page_shows(
    newcomer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Line by line, from one "..." to the next."""
    Path("compare.py").write_text(SCRIPT)
    *before, (last, shown) = sessions()
    assert len(before) == 7
    for command, wanted in before:
        holds(printed(command, capsys), wanted)
    (newcomer / "specs" / "families" / "gptj.toml").write_text(FAMILY)
    holds(printed(last, capsys), shown)


def test_the_hybrid_is_proposed_compared_and_corrected(
    newcomer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (newcomer / "specs" / "families" / "nemotron_h.toml").unlink()
    shutil.copytree(ROOT / "tests" / "goldens" / "nemotron_h", "hybrid")
    Path("compare_hybrid.py").write_text(COMPARED)
    commands = sessions(HYBRID)
    assert len(commands) == 5
    for command, wanted in commands:
        holds(printed(command, capsys), wanted)


def holds(text: str, wanted: str) -> None:
    """Raises unless the text is the wanted one, whole lines, where "..." stands for any."""
    text, at = f"\n{text}", 0
    for part in re.split(r"^\.\.\.\n", wanted, flags=re.MULTILINE):
        found = text.find(f"\n{part}", at)
        assert found >= 0, f"{part}\nis not in\n{text[at:]}"
        at = found + len(part)
    assert wanted.endswith("...\n") or at == len(text) - 1, f"more follows:{text[at:]}"


def test_every_tensor_is_in_the_first_listing() -> None:
    names = {re.sub(r"\.h\.\d", ".h.{0..1}", name) for name in gptj.gptj_shapes(gptj.CONFIG)}
    listed = re.findall(r"^  (\S+\.\S+) ", sessions()[0][1], flags=re.MULTILINE)
    assert set(listed) == names


def test_the_family_has_the_logits_of_the_definition(newcomer: Path) -> None:
    (newcomer / "specs" / "families" / "gptj.toml").write_text(FAMILY)
    with np.load("gptj/expected.npz") as expected:
        got = LLM("gptj", dtype="float32").logits([expected["tokens"].tolist()])[0]
        close(got, expected["logits"])


def test_the_answer_says_the_same() -> None:
    """The family that comes with jinfer is the one that the page arrives at."""
    answer = (ROOT / "specs" / "families" / "gptj.toml").read_text(encoding="utf-8")
    assert tomllib.loads(FAMILY) == tomllib.loads(answer)
