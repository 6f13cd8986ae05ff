"""Every command and every block of Python printed in README and docs is run as it is printed.

In a folder in which what they name lies ready, tiny where a model is meant. What cannot be run here
is in a table with the reason, and its arguments are parsed all the same. So a command that is
printed anew is run, or fails until it can be.
"""

import argparse
import ast
import asyncio
import inspect
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jinfer import LLM
from jinfer.cli import main
from jinfer.cli.entry_point import COMMANDS
from jinfer.cpu import build_library
from jinfer.loader.open_model import open_files
from jinfer.server.http.server_settings import ModelSource
from tests.cli.listening import listen
from tests.printed_commands import FENCE, Printed, is_command, printed_on
from tests.server.running import serving
from tools.bench_models import LlamaShape, make_up

from .test_worked_example import COMPARED, HYBRID, SCRIPT, sessions

# Most commands open the same tiny model.
pytestmark = pytest.mark.usefixtures("shared_programs")

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# What cannot be run here, and why; of these the arguments are parsed.
NOT_RUN = {
    "jinfer pull qwen3_0.6b": "fetches from a hub",
    "python -m tools.bench_kernels": "needs a GPU",
    "python -m tools.bench_programs": "needs a GPU",
    "pytest -m gpu": "needs a GPU",
    "make gpu": "needs a GPU",
    "jinfer bench cpu MODEL.gguf --peer-python PYTHON": "needs llama.cpp",
    "jinfer quality smol_f16.gguf --text text.txt --windows 32 --method rtn --method mse "
    "--method gptq --peer-python PYTHON": "needs llama.cpp",
    "jinfer quality smol_f16.gguf --text text.txt --peer-python PYTHON --peer-type IQ4_XS "
    "--peer-imatrix": "needs llama.cpp",
    "python -m tests.slow_tests report.xml": "reads a report of all tests; "
    "tests/test_slow_tests.py",
    "pytest -m soak tests/kernels_pallas": "takes minutes, and packages for a GPU",
    "pytest tests/sampling/test_samplers.py": "are other tests",
    "pip install .": "installs; tests/test_wheel.py does it in an environment of its own",
    "pip install 'jinfer[cuda]'": "installs",
    "pip install 'jinfer[hosts]'": "installs",
    "pip install 'jinfer[hub]'": "installs",
    "pip install 'jinfer[images]'": "installs",
    "pip install 'jinfer[orbax]'": "installs",
    "pip install 'jinfer[serve]'": "installs",
    "jinfer serve smollm2_135m_instruct --port 8080": "serves until it is told to stop; "
    "tests/server/test_run_server.py",
    "pip install '.[sass]'": "installs",
    "python -m jinfer.cpu --into-package": "writes to the package; tests/cpu/test_prebuilt.py",
    "make test": "is what runs this",
    "make soak": "is what runs this",
    "make sanitize": "takes an hour, and builds the custom calls anew",
    "make lint": "checks this file too",
    "make docs": "installs the packages of the site",
    "python -m tools.write_reference": "writes docs/reference; tests/test_reference.py",
    "make wheel": "compiles all kernels, for minutes; tests/test_wheel.py with the other soaks",
    ".ci/run": "is what runs this",
}
# What takes long is run with the other tests that do.
SLOW = {
    "python -m jinfer.cpu",
    "jinfer chat spec.toml --set quantization.weights=q3.5 --set quantization.kv_cache=q8",
    "jinfer bench cpu MODEL.gguf",
    "jinfer bench cpu MODEL.gguf --beside CHECKOUT",
    "jinfer bench engine smollm2_135m_instruct",
    "jinfer bench speculate smollm2_135m_instruct",
    "jinfer bench speculate MODEL.gguf --accuracy 0 0.8 0.9 --nodes 0 4 8 16 --tokens 192 "
    "--rounds 3",
    "python -m tools.bench_models made.gguf --shape 1.1b",
    "jinfer quality SOURCE --text text.txt",
}
ELSEWHERE = {
    **{c: "tests/test_worked_example.py" for c, _ in [*sessions(), *sessions(HYBRID)]},
    SCRIPT: "tests/test_worked_example.py",
    COMPARED: "tests/test_worked_example.py",
    "make demo": "tests/test_demonstration.py",
}
# Blocks of Python with one of these lines, and what they need.
NOT_IMPORTABLE = {
    "import torch": "makes goldens, in an environment of its own",
    "from ray import serve": "needs Ray, and serves until it is told to stop",
    "import ray": "as the other one; tests/parallel/distributed/test_ray.py runs it",
}
# Commands that do nothing without arguments.
NAMES = {command.name for command in COMMANDS} - {"list"}
ASKS = re.compile(r"curl |jinfer client |python -m jinfer\.client |jinfer bench serve ")
AT = "localhost:8080"
FEW = "[generation]\nmax_tokens = 24\n"
LANGUAGES = {"", "sh", "console", "python", "toml", "json", "ini", "text"}
ALL = [each for page in PAGES for each in printed_on(page)]
HERE = [each for each in ALL if each.text not in ELSEWHERE]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights that knows words and how to chat."""
    path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    words = open_files("smollm2_135m_instruct", {}).weights
    make_up(LlamaShape(2, 64, 4, 2, 96, context=8192), words, path, "Q4_0")
    return path


@pytest.fixture(scope="module")
def folders(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each page a folder with what its commands name."""
    made = {}
    for page in PAGES:
        made[page.name] = folder = tmp_path_factory.mktemp(page.stem)
        for name in ("path/to/checkpoint", "checkpoints/small", "specs/families"):
            (folder / name).mkdir(parents=True)
        for name in ("model.gguf", "MODEL.gguf", "SOURCE", "smol_f16.gguf",
                     "path/to/checkpoint/model.gguf", "checkpoints/small/model.gguf"):  # fmt: skip
            os.link(tiny, folder / name)
        # What exists as a folder is meant before a name.
        (folder / "smollm2_135m_instruct").mkdir()
        os.link(tiny, folder / "smollm2_135m_instruct/model.gguf")
        # Where nobody says how long an answer may be, this one would fill the context.
        for name in ("spec.toml", "smollm2_135m_instruct/spec.toml"):
            (folder / name).write_text(f'weights = "model.gguf"\n{FEW}')
        (folder / "specs/small.toml").write_text(f'weights = "../model.gguf"\n{FEW}')
        shutil.copy(ROOT / "specs/families/gptj.toml", folder / "specs/families")
        for name in ("text.txt", "calibration.txt"):
            (folder / name).write_text("The quick brown fox jumps over the lazy dog. " * 80)
        (folder / "CHECKOUT").symlink_to(ROOT)
        (folder / "vision_model").symlink_to(ROOT / "tests/goldens/vlm_smolvlm")
        shutil.copy(ROOT / "tests/goldens/vlm_images/img0.png", folder / "photo.png")
    return made


@pytest.fixture
def folder(
    folders: dict[str, Path], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Where the test's own command is run; what it reads from the keyboard is a word."""
    here = folders[request.getfixturevalue("each").page]
    monkeypatch.chdir(here)
    typed = io.TextIOWrapper(io.BytesIO(b"Hello\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", typed)
    return here


@pytest.fixture(scope="module")
def service(tiny: Path) -> Iterator[str]:
    """Where a server is that answers."""
    with serving([ModelSource("tiny", str(tiny), {"generation.max_tokens": 24})]) as running:
        yield running.url


@pytest.fixture
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test's own command; one that asks the usual server asks one that is there."""
    text: str = request.getfixturevalue("each").text
    if ASKS.match(text) is None:
        return text
    url = request.getfixturevalue("service")
    monkeypatch.setenv("JINFER_URL", url)
    return text.replace(AT, url.removeprefix("http://"))


def run(text: str) -> int:
    """Runs a command as a shell would, but jinfer's own in this process; returns its status."""
    words = shlex.split(text)
    try:
        match words:
            case ["jinfer", *name] if " ".join(name) in NAMES:  # spoken of, not printed to be run
                return main([*name, "--help"])
            case ["jinfer", *arguments]:
                return main(arguments)
            case ["python", "-m", module, *arguments]:
                return run_module(module, arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    match words:
        case [("mv" | "tail"), *_]:
            return subprocess.run(words, check=False).returncode
        case ["curl", *_]:
            return subprocess.run([*words, "--fail", "--silent"], check=False).returncode
    raise AssertionError(f"{text}: nothing here knows how to run that; see NOT_RUN")


def run_module(module: str, arguments: list[str]) -> int:
    """`python -m module`."""
    before, known = sys.argv, sys.modules.pop(module, None)  # as if nobody had imported it
    sys.argv = ["python -m", *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before
        if known is not None:
            sys.modules[module] = known
    return 0


@pytest.mark.parametrize(
    "each",
    [
        pytest.param(each, id=each.id, marks=[pytest.mark.soak] if each.text in SLOW else [])
        for each in HERE
        if each.language == "sh" and each.text not in NOT_RUN
    ],
)
def test_a_command_runs(
    each: Printed, folder: Path, asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(asked)
    printed = capsys.readouterr()
    assert status == 0, f"{each.id}: {each.text}\n{printed.err}"


@pytest.mark.soak
@pytest.mark.parametrize(
    "each",
    [
        pytest.param(each, id=each.id)
        for each in HERE
        if each.text.startswith("jinfer ")
        if each.text not in NOT_RUN and each.text.removeprefix("jinfer ") not in NAMES
    ],
)
def test_no_command_is_silent_for_more_than_a_second(
    each: Printed, folder: Path, asked: str, tmp_path: Path
) -> None:
    """The first time, on a terminal, where only the custom calls were compiled before."""
    library = build_library.library_path()
    kept = shutil.copytree(library.parent, tmp_path / "libraries" / library.parent.name)
    for path in (kept.parent, kept, kept / library.name):
        path.chmod(0o700)
    heard = listen(shlex.split(asked), "/exit\n", folder, JINFER_CACHE=str(tmp_path))
    assert heard.status == 0, heard.text
    assert heard.silence <= heard.most, (heard.silence, heard.before)


def test_nothing_that_is_printed_needs_a_checkout() -> None:
    """An installation has no folder of specifications or tools, but names and commands.

    Pages of measurements name scripts of the source tree, with which they were made.
    """
    checkout = re.compile(r"\bspecs/(?!families|small\b)|python -m jinfer\.(gen|ser|cli)")
    assert [each.id for each in ALL if checkout.search(each.text)] == []
    scripts = {each.page for each in ALL if "python -m tools" in each.text}
    assert scripts <= {"benchmarks.md", "kernels.md", "partition.md", "contributing.md", "style.md"}


@pytest.mark.parametrize(
    "each",
    [
        pytest.param(each, id=each.id)
        for each in HERE
        if each.language == "python" and not any(line in each.text for line in NOT_IMPORTABLE)
    ],
)
def test_a_block_of_python_runs(each: Printed, folder: Path, tiny: Path) -> None:
    """As in a notebook: with what the page speaks of at hand, and `await` at the top."""
    names: dict[str, Any] = {"LLM": LLM}
    if "tokenizer" in each.text:
        with LLM(tiny) as llm:
            names["tokenizer"] = llm.tokenizer
    code = compile(each.text, each.id, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    # As in a user's program, where JAX promotes types and ranks.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(eval(code, names))
        else:
            exec(code, names)


class ParsedError(Exception):
    """Raised instead of going on after the arguments were understood."""


@pytest.mark.parametrize("text", [*NOT_RUN, *sorted(SLOW)])
def test_arguments_of_the_others_are_understood(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, *arguments: Any) -> None:
        parse(self, *arguments)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    program, *words = shlex.split(text)
    if program == "jinfer":
        with pytest.raises(ParsedError):
            main(words)
    elif program == "python":
        with pytest.raises(ParsedError):
            run_module(words[1], words[2:])
    elif program == "make":
        subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, check=True)
    elif program == "pytest":
        paths = words
        if words[0] == "-m":
            _, marker, *paths = words
            markers = PROJECT["tool"]["pytest"]["ini_options"]["markers"]
            assert any(each.startswith(f"{marker}:") for each in markers)
        assert all((ROOT / path).exists() for path in paths)
    elif program == "pip":
        found = re.fullmatch(r"(?:jinfer|\.)(?:\[(\w+)\])?", words[-1])
        assert found
        assert words[:-1] == ["install"]
        assert found[1] in (None, *PROJECT["project"]["optional-dependencies"])
    else:
        assert os.access(ROOT / program, os.X_OK)


def test_nothing_else_is_excused() -> None:
    """Each exception is printed somewhere, and blocks say what they are."""
    texts = {each.text for each in ALL}
    assert {*NOT_RUN, *SLOW, *ELSEWHERE} <= texts
    for line in NOT_IMPORTABLE:
        (block,) = (each for each in ALL if f"{line}\n" in each.text)
        compile(block.text, block.id, "exec")
    for page in PAGES:
        for language, inside in FENCE.findall(page.read_text(encoding="utf-8")):
            assert language in LANGUAGES, page
            if not language:
                assert not any(is_command(line.removeprefix("$ ")) for line in inside.split("\n"))


def test_what_is_printed_is_found(tmp_path: Path) -> None:
    """The finder itself, on a page made up for it."""
    page = tmp_path / "page.md"
    page.write_text(
        "Say `jinfer list` or\n`python -m\njinfer`, not `jinfer/api/llm.py` nor `make`.\n\n"
        "```sh\njinfer a \\\n    --b  # why\n\njinfer c\n```\n"
        "```console\n$ make x\nprinted\n```\n```python\nx = 1\n```\n"
    )
    found = [(each.line, each.language, each.text) for each in printed_on(page)]
    assert found == [
        (1, "sh", "jinfer list"),
        (2, "sh", "python -m jinfer"),
        (6, "sh", "jinfer a --b"),
        (9, "sh", "jinfer c"),
        (12, "sh", "make x"),
        (16, "python", "x = 1\n"),
    ]
    assert run("jinfer genrate") == 2
    with pytest.raises(AssertionError, match="nothing here knows"):
        run("rm x")
