"""Project files: versions and ranges that several files name are equal."""

import re
import tomllib
from pathlib import Path

import yaml

from jinfer.engine.runner.known_jaxlib import KNOWN, is_known
from jinfer.version import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = ROOT / ".github" / "workflows"


def jax_range() -> tuple[str, str]:
    """The oldest version of JAX, and the first that is too new."""
    (requirement,) = (each for each in PROJECT["project"]["dependencies"] if "jax>=" in each)
    match = re.fullmatch(r"jax>=([\d.]+),<([\d.]+)", requirement)
    assert match
    return match[1], match[2]


def test_range_of_jax_is_the_range_of_known_versions() -> None:
    oldest, excluded = jax_range()
    assert is_known(oldest)
    assert not is_known(f"{excluded}.0")
    newest = max(int(known.split(".")[1]) for known in KNOWN)
    assert excluded == f"0.{newest + 1}"


def test_extras_have_the_range_of_jax() -> None:
    oldest, excluded = jax_range()
    for requirements in PROJECT["project"]["optional-dependencies"].values():
        for each in requirements:
            if re.match(r"jax[\[-]", each):
                assert each.endswith(f">={oldest},<{excluded}")


def test_wheels_are_built_against_the_oldest_jaxlib() -> None:
    assert f"jaxlib=={jax_range()[0]}" in PROJECT["tool"]["cibuildwheel"]["before-build"]


def test_workflows_cover_the_supported_versions_of_python() -> None:
    tests = yaml.safe_load((WORKFLOWS / "tests.yml").read_text(encoding="utf-8"))
    matrix = tests["jobs"]["tests"]["strategy"]["matrix"]
    prefix = "Programming Language :: Python :: "
    supported = [each.removeprefix(prefix) for each in PROJECT["project"]["classifiers"]
                 if each.startswith(prefix)]  # fmt: skip
    assert matrix["python"] == supported
    assert PROJECT["project"]["requires-python"] == f">={supported[0]}"
    assert any("arm" in machine for machine in matrix["machine"])


def test_every_target_of_the_workflows_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for path in WORKFLOWS.iterdir():
        for target in re.findall(r"run: make (\w+)", path.read_text(encoding="utf-8")):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_changelog_has_the_version_and_is_short() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## Unreleased" in text
    assert f"## {__version__} (" in text
    assert len(text.split()) <= 1500
    assert __version__.rpartition(".")[0] in (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_site_lists_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    docs = ROOT / "docs"
    assert set(re.findall(r": ([\w/]+\.md)$", text, re.MULTILINE)) == {
        path.relative_to(docs).as_posix() for path in docs.rglob("*.md")
    }
