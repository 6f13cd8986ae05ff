"""The rules that keep the project readable: import direction, sizes, documentation, clean files.

Every checker returns lines that name the offence, and is tried on a made-up tree before it is
trusted with the real one.
"""

import ast
import functools
import graphlib
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A unit is a top-level module or package of jinfer, or one of the folders beside it. Each may
# import the levels above its own in this list, and its own level as long as no circle arises.
KERNELS = {"kernels_pallas", "cpu"}
LEVELS = [
    {"markup", "progress", "runtime"},
    KERNELS,
    {"guard", "matmul_precision", "version"},
    {"modelspec", "checkpoint", "tokenizer"},
    {"quant", "template"},
    {"ops"},
    {"nn"},
    {"weights", "sampling"},
    {"engine"},
    {"opening", "parallel"},
    {"distributed", "speculate"},
    {"api"},
    {"jinfer", "views"},
    {"cli"},
    {"server", "generate", "serve", "client", "tools", "__main__"},
]
LEVEL_OF = {unit: level for level, units in enumerate(LEVELS) for unit in units}
# Who has the plain references that stand beside kernels.
USERS = {"ops", "quant", "tools"}

# The second and third only make golden files, the first comes along with Flax.
FORBIDDEN_IMPORTS = {"optax", "torch", "transformers"}

# Units that import JAX or Flax at the top of a module: what compiles and what computes. The others
# import it in a function, if at all, so that help, flags and refusals need not wait for it.
JAX_UNITS = {
    "api",
    "cpu",
    "distributed",
    "engine",
    "kernels_pallas",
    "matmul_precision",
    "nn",
    "opening",
    "ops",
    "parallel",
    "quant",
    "runtime",
    "sampling",
    "speculate",
    "tools",
    "weights",
}
# Modules that read JAX's private parts, and why. Nothing replaces them.
PRIVATE_JAX = {
    "jinfer/distributed/collective_address.py": "the address of gloo's sockets",
    "jinfer/distributed/job_config.py": "clusters that JAX detects",
    "jinfer/distributed/process_group.py": "the state of JAX's coordination service",
    "jinfer/distributed/shared_compile_cache.py": "one process compiles for all",
    "jinfer/engine/runner/aot_serialization.py": "executables that were not compiled here",
    "jinfer/engine/runner/program_cache.py": "a thread's setting of the compilation cache",
    "jinfer/ops/thread_limit.py": "whether XLA has started",
    "jinfer/runtime/executable.py": "calls without JAX's dispatch",
}

MAX_LINES = 400
LONG_MODULES: dict[str, str] = {}  # path -> why it is better whole

MAX_FLOORS = 12
# Folders in which a file of the same name has the same subject.
MIRRORS = [
    {"jinfer/server", "jinfer/server/schemas"},
    {"kernels_pallas/attention", "kernels_pallas/matmul"},  # triton, mosaic, grid
    {"jinfer/ops", "kernels_pallas"},
    {"jinfer/ops/attention", "kernels_pallas/attention"},
    {"jinfer/ops/matmul", "kernels_pallas/matmul"},
]

# Put together here, so that this file is not the one that names them.
REGISTRIES = {
    "pypi": "org",
    "pythonhosted": "org",
    "npmjs": "(org|com)",
    "anaconda": "org",
    "pytorch": "org/whl",
    "debian": "org",
    "archive.ubuntu": "com",
    "proxy.golang": "org",
    "crates": "io",
}
UNWANTED_TEXT = re.compile(
    "|".join(rf"\b{name}\.{end}\b" for name, end in REGISTRIES.items())
    + r"|(?<![\w.])/(?:root|work|home/\w+|Users/\w+)/"
)


def source_files(root: Path) -> list[Path]:
    """The project's own modules, without its tests."""
    folders = [root / name for name in ("jinfer", "kernels_pallas", "tools")]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def dotted_name(root: Path, path: Path) -> list[str]:
    """`jinfer/nn/mla.py` -> ["jinfer", "nn", "mla"]; a package is named by its folder."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(root: Path, path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, dotted name) of all that a module imports, wherever in it the statement stands."""
    package = dotted_name(root, path)
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                yield node.lineno, [*module, alias.name]


def unit_of(root: Path, name: list[str]) -> str | None:
    """The unit that a dotted name belongs to; None for what is not the project's."""
    if name[0] in ("kernels_pallas", "tools"):
        return name[0]
    if name[0] != "jinfer":
        return None
    inner = name[1] if len(name) > 1 else ""
    is_module = (root / "jinfer" / inner).is_dir() or (root / f"jinfer/{inner}.py").is_file()
    return inner if inner and is_module else "jinfer"


def direction_offences(root: Path) -> list[str]:
    """Imports against the direction, kernels imported elsewhere than in ops, units in a circle."""
    offences = []
    graph: dict[str, set[str]] = {}
    for path in source_files(root):
        importer = unit_of(root, dotted_name(root, path))
        if importer not in LEVEL_OF:
            offences.append(f"{path.relative_to(root)}: {importer} has no place in LEVELS")
            continue
        for line, name in imports(root, path):
            imported = unit_of(root, name)
            if imported in (None, importer):
                continue
            where = f"{path.relative_to(root)}:{line}: {importer} imports {imported}"
            if imported in KERNELS and importer not in USERS:
                offences.append(f"{where}, which only {' and '.join(sorted(USERS))} may")
            elif LEVEL_OF.get(imported, 0) > LEVEL_OF[importer]:
                offences.append(f"{where}, which stands above it")
            graph.setdefault(importer, set()).add(imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        offences.append("a circle: " + " -> ".join(error.args[1]))
    return offences


def module_graph(root: Path) -> dict[str, set[str]]:
    """Which modules each module imports, lazily and for types too."""
    names = {".".join(dotted_name(root, path)): path for path in source_files(root)}
    graph: dict[str, set[str]] = {}
    for module, path in names.items():
        imported = graph.setdefault(module, set())
        for _, parts in imports(root, path):
            while parts and ".".join(parts) not in names:
                parts = parts[:-1]
            if parts and ".".join(parts) != module:
                imported.add(".".join(parts))
    return graph


def circles(root: Path) -> list[str]:
    """A ring of modules that import each other, if there is any."""
    try:
        graphlib.TopologicalSorter(module_graph(root)).prepare()
    except graphlib.CycleError as error:
        return ["a circle of modules: " + " -> ".join(error.args[1])]
    return []


def floors(root: Path) -> dict[str, int]:
    """How many units stand below each, one upon the other, itself included."""
    below: dict[str, set[str]] = {}
    for module, imported in module_graph(root).items():
        units = {unit_of(root, name.split(".")) for name in [module, *imported]} - {None}
        own = unit_of(root, module.split("."))
        assert own is not None
        below.setdefault(own, set()).update(unit for unit in units if unit not in (None, own))

    @functools.cache
    def floor(unit: str) -> int:
        return 1 + max(map(floor, below.get(unit, ())), default=0)

    return {unit: floor(unit) for unit in below}


def shared_names(root: Path) -> list[str]:
    """Names that modules of several folders have; one word is to have one meaning."""
    homes: dict[str, list[str]] = {}
    for path in source_files(root):
        if path.stem not in ("__init__", "__main__"):
            homes.setdefault(path.stem, []).append(str(path.parent.relative_to(root)))
    return [
        f"{name}: {', '.join(folders)}"
        for name, folders in sorted(homes.items())
        if len(folders) > 1 and not any(set(folders) <= pair for pair in MIRRORS)
    ]


def forbidden_imports(root: Path) -> list[str]:
    """Imports in the engine of what it must run without."""
    return [
        f"{path.relative_to(root)}:{line}: imports {name[0]}"
        for path in source_files(root)
        if path.relative_to(root).parts[0] != "tools"
        for line, name in imports(root, path)
        if name[0] in FORBIDDEN_IMPORTS
    ]


def early_jax(root: Path) -> list[str]:
    """Modules that import JAX or Flax while they are imported, in units that should not."""
    offences = []
    for path in source_files(root):
        unit = unit_of(root, dotted_name(root, path))
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                if name.split(".")[0] in ("jax", "jaxlib", "flax") and unit not in JAX_UNITS:
                    offences.append(f"{path.relative_to(root)}:{node.lineno}: imports {name}")
    return offences


def private_jax(root: Path) -> set[str]:
    """Modules that import private parts of JAX or jaxlib."""
    return {
        str(path.relative_to(root))
        for path in source_files(root)
        for _, name in imports(root, path)
        if name[:2] in (["jax", "_src"], ["jaxlib", "_jax"], ["jaxlib", "xla_client"])
    }


def size_offences(root: Path, reasons: dict[str, str]) -> list[str]:
    """Modules too long to be read in one go, and exceptions that are no longer needed."""
    lengths = {
        str(path.relative_to(root)): len(path.read_text(encoding="utf-8").splitlines())
        for path in source_files(root)
    }
    too_long = {name for name, length in lengths.items() if length > MAX_LINES}
    return [f"{name}: {lengths[name]} lines" for name in sorted(too_long - reasons.keys())] + [
        f"{name}: needs no exception" for name in sorted(reasons.keys() - too_long)
    ]


def undocumented(root: Path) -> list[str]:
    """Public classes and functions without a docstring, in public modules."""
    return [
        f"{path.relative_to(root)}:{node.lineno}: {node.name} has no docstring"
        for path in source_files(root)
        if not any(re.match("_[^_]", part) for part in dotted_name(root, path))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if not node.name.startswith("_") and not ast.get_docstring(node)
    ]


def unwanted_text(root: Path, names: list[str]) -> list[str]:
    """Lines of text files that name a package registry's host or a place on somebody's machine."""
    offences = []
    for name in names:
        content = (root / name).read_bytes()
        if b"\0" in content:
            continue
        for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
            if found := UNWANTED_TEXT.search(line):
                offences.append(f"{name}:{number}: {found.group()}")
    return offences


def unlisted_packages(root: Path) -> list[str]:
    """Folders with code that pyproject.toml does not name, and would be missing from a wheel."""
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        re.sub(r"^tools\b", "jinfer.tools", ".".join(path.parent.relative_to(root).parts))
        for path in source_files(root)
    }
    return sorted(folders - set(listed))


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
        "pyproject.toml": "tool.setuptools.packages = "
        '["jinfer", "jinfer.nn", "jinfer.tools", "kernels_pallas"]\n',
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


def test_floors_are_counted(tree: Path) -> None:
    expected = {"kernels_pallas": 1, "ops": 2, "nn": 3, "engine": 4, "api": 5, "jinfer": 6}
    assert floors(tree) == {**expected, "tools": 7}


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


def test_modules_import_in_no_circle() -> None:
    assert circles(ROOT) == []


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
