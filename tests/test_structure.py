"""The rules of structure: each is tried on a made-up tree before the real one is held to it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.structure import (
    FOLDER_CIRCLES,
    LONG_MODULES,
    MAX_FILES,
    MAX_FLOORS,
    MAX_LINES,
    NAMES_IN_STRINGS,
    PRIVATE_JAX,
    ROOT,
    circles,
    crowded_folders,
    direction_offences,
    early_jax,
    floors,
    folder_circles,
    forbidden_imports,
    names_in_strings,
    private_jax,
    shared_names,
    size_offences,
    undocumented,
    unlisted_packages,
    unwanted_text,
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small project without an offence."""
    files = {
        "jinfer/__init__.py": "from .api import LLM\n",
        "jinfer/api.py": 'from .engine import step\n\nclass LLM:\n    """."""\n',
        "jinfer/engine.py": 'from .nn.norm import rms\n\ndef step():\n    """."""\n',
        "jinfer/nn/__init__.py": "",
        "jinfer/nn/norm.py": "import math\nfrom jinfer import ops\nfrom . import rope\n",
        "jinfer/nn/rope.py": "def _private(): ...\n",
        "jinfer/ops.py": "import kernels_pallas.matmul\n",
        "kernels_pallas/matmul.py": "import jax\n",
        "tools/bench.py": "import torch\nfrom jinfer import LLM\n",
        "pyproject.toml": 'tool.setuptools.packages = ["jinfer", "jinfer.nn", "kernels_pallas"]\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def all_offences(root: Path) -> list[str]:
    """What every checker that reads modules finds."""
    return [
        *direction_offences(root),
        *forbidden_imports(root),
        *size_offences(root, {}),
        *undocumented(root),
        *unlisted_packages(root),
    ]


def test_clean_tree_has_no_offence(tree: Path) -> None:
    assert all_offences(tree) == []


@pytest.mark.parametrize(
    ("name", "text", "offence"),
    [
        ("jinfer/ops.py", "\nfrom .api import LLM", "jinfer/ops.py:2: ops imports api"),
        ("jinfer/ops.py", "import jinfer.engine", "jinfer/ops.py:1: ops imports engine"),
        ("jinfer/ops.py", "from jinfer import LLM", "jinfer/ops.py:1: ops imports jinfer"),
        ("jinfer/nn/rope.py", "from ..model import M", "jinfer/nn/rope.py:1: nn imports jinfer"),
        ("jinfer/nn/rope.py", "def _f():\n  from .. import api", "rope.py:2: nn imports api"),
        ("jinfer/engine.py", "import kernels_pallas", "engine.py:1: engine imports kernels_pallas"),
        ("kernels_pallas/matmul.py", "import jinfer.ops", "kernels_pallas imports ops"),
        ("jinfer/speculate.py", "import jinfer.engine", "a circle: "),
        ("jinfer/misc.py", "", "jinfer/misc.py: misc has no place in LEVELS"),
        ("jinfer/nn/rope.py", "def _f():\n  import optax.losses", "rope.py:2: imports optax"),
        ("jinfer/ops.py", "from torch import nn", "jinfer/ops.py:1: imports torch"),
        ("jinfer/ops.py", "x = 1\n" * (MAX_LINES + 1), f"jinfer/ops.py: {MAX_LINES + 1} lines"),
        ("jinfer/ops.py", "def linear(): ...", "jinfer/ops.py:1: linear has no docstring"),
        ("jinfer/ops.py", "\nclass Linear: ...", "jinfer/ops.py:2: Linear has no docstring"),
        ("jinfer/server/routes.py", "", "jinfer.server"),
    ],
)
def test_offence_is_found(tree: Path, name: str, text: str, offence: str) -> None:
    (tree / "jinfer/engine.py").write_text("import jinfer.speculate")  # half of a circle
    (tree / "jinfer/speculate.py").write_text("")
    (tree / name).parent.mkdir(exist_ok=True)
    (tree / name).write_text(text)
    assert any(offence in line for line in all_offences(tree)), all_offences(tree)


def test_circle_is_found(tree: Path) -> None:
    assert circles(tree) == []
    (tree / "jinfer/nn/rope.py").write_text("if True:\n  from .norm import rms")
    (offence,) = circles(tree)
    assert "jinfer.nn.norm" in offence
    assert "jinfer.nn.rope" in offence


def test_circle_of_folders_is_found(tree: Path) -> None:
    for name, text in {
        "jinfer/server/core/service.py": "from jinfer.server.http import errors",
        "jinfer/server/http/errors.py": "",
        "jinfer/server/http/query.py": "",
        "jinfer/server/core/fields.py": "",
        "jinfer/server/routes.py": "from jinfer.server.core import service",
    }.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    assert folder_circles(tree) == {}
    # No module imports in a circle, but each folder imports from the other one.
    (tree / "jinfer/server/http/query.py").write_text("import jinfer.server.core.fields")
    assert circles(tree) == []
    (package, circle), *others = folder_circles(tree).items()
    assert (package, others) == ("jinfer.server", [])
    assert {"core", "http"} == set(circle.split(" -> "))
    (tree / "jinfer/server/http/query.py").write_text("")
    (tree / "jinfer/server/core/fields.py").write_text("def f():\n  from .. import routes")
    assert "routes" in folder_circles(tree)["jinfer.server"]


def test_crowded_folder_is_found(tree: Path) -> None:
    for number in range(MAX_FILES - 2):
        (tree / f"jinfer/nn/block_{number}.py").write_text("")
    assert crowded_folders(tree, "jinfer") == ["jinfer/nn: 26 modules"]
    (tree / "jinfer/nn/block_0.py").unlink()
    assert crowded_folders(tree, "jinfer") == []


def test_floors_are_counted(tree: Path) -> None:
    expected = {"kernels_pallas": 1, "ops": 2, "nn": 3, "engine": 4, "api": 5, "jinfer": 6}
    assert floors(tree) == {**expected, "tools": 7}


def test_module_named_in_a_string_is_found(tree: Path) -> None:
    (tree / "jinfer/ops.py").write_text('table = {1: "jinfer.nn.norm.rms", 2: "jinfer.ops"}\n')
    assert names_in_strings(tree) == {
        "jinfer/ops.py": ["jinfer/ops.py:1: names jinfer.nn.norm.rms"]
    }
    (tree / "jinfer/ops.py").write_text('"""See `jinfer.nn.norm`."""\n')
    assert names_in_strings(tree) == {}


def test_shared_name_is_found(tree: Path) -> None:
    assert shared_names(tree) == []
    (tree / "tools/rope.py").write_text("")
    assert shared_names(tree) == ["rope: jinfer/nn, tools"]


def test_exception_to_the_size_is_used_or_refused(tree: Path) -> None:
    (tree / "jinfer/ops.py").write_text("x = 1\n" * (MAX_LINES + 1))
    assert size_offences(tree, {"jinfer/ops.py": "one table"}) == []
    assert size_offences(tree, {"jinfer/ops.py": "one table", "jinfer/api.py": ""}) != []


def test_early_import_of_jax_is_found(tree: Path) -> None:
    assert early_jax(tree) == []
    (tree / "jinfer/cli").mkdir()
    (tree / "jinfer/cli/flags.py").write_text("def f():\n  import jax\n")
    assert early_jax(tree) == []
    (tree / "jinfer/cli/flags.py").write_text("import jax.numpy as jnp\n")
    assert early_jax(tree) == ["jinfer/cli/flags.py:1: imports jax.numpy"]


def test_private_parts_of_jax_are_found(tree: Path) -> None:
    assert private_jax(tree) == set()
    (tree / "jinfer/ops.py").write_text("def f():\n  from jax._src import core\n")
    (tree / "jinfer/engine.py").write_text("from jaxlib import _jax\n")
    assert private_jax(tree) == {"jinfer/ops.py", "jinfer/engine.py"}


@pytest.mark.parametrize(
    "line", ["see /home/" + "me/models", '"/wo' + 'rk/x"', "https://py" + "pi.org/simple"]
)
def test_unwanted_text_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "notes.md").write_text(f"fine: docs/work/x, ~/models\n{line}\n")
    (tmp_path / "weights.bin").write_bytes(b"\0" + line.encode())
    (offence,) = unwanted_text(tmp_path, ["notes.md", "weights.bin"])
    assert offence.startswith("notes.md:2: ")


def test_imports_go_one_way() -> None:
    assert direction_offences(ROOT) == []


def test_strings_name_modules_below() -> None:
    assert names_in_strings(ROOT).keys() <= NAMES_IN_STRINGS.keys()


def test_modules_import_in_no_circle() -> None:
    assert circles(ROOT) == []


def test_folders_import_in_no_circle() -> None:
    found = folder_circles(ROOT)
    assert found.keys() <= FOLDER_CIRCLES.keys(), found


def test_folders_of_the_server_are_small() -> None:
    assert crowded_folders(ROOT, "jinfer/server") == []


def test_house_is_low() -> None:
    heights = floors(ROOT)
    top = max(heights.values())
    assert top <= MAX_FLOORS, sorted(heights.items(), key=lambda item: item[1])


def test_a_name_is_one_module() -> None:
    assert shared_names(ROOT) == []


def test_engine_needs_no_other_framework() -> None:
    assert forbidden_imports(ROOT) == []


def test_jax_is_imported_by_what_computes() -> None:
    assert early_jax(ROOT) == []


def test_private_parts_of_jax_are_read_in_few_places() -> None:
    assert private_jax(ROOT) == PRIVATE_JAX.keys()


def test_modules_are_short() -> None:
    assert size_offences(ROOT, LONG_MODULES) == []


def test_public_names_are_documented() -> None:
    assert undocumented(ROOT) == []


def test_every_package_is_installed() -> None:
    assert unlisted_packages(ROOT) == [], "add these to `packages` in pyproject.toml"


def test_files_name_no_registry_and_no_machine() -> None:
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("only a git checkout knows which files are the project's")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    existing = [name for name in names.split("\0") if (ROOT / name).is_file()]
    assert unwanted_text(ROOT, existing) == []


def test_modules_in_documentation_exist() -> None:
    pattern = re.compile(r"\b(?:jinfer|kernels_pallas|tests|tools)/[\w/]+\.py\b")
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {path for page in pages for path in pattern.findall(page.read_text(encoding="utf-8"))}
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []
