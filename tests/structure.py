"""The rules that keep the project readable: import direction, sizes, documentation, clean files.

Every checker returns lines that name the offence.
"""

import ast
import collections
import functools
import graphlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# A unit is a top-level module or package of jinfer, or one of the folders beside it. Each may
# import the levels above its own in this list, and its own level as long as no circle arises.
KERNELS = {"kernels_pallas", "cpu"}
LEVELS = [
    {"disk_cache", "html", "progress", "quant_format", "startup"},
    KERNELS,
    {"sandbox", "matmul_precision", "version"},
    {"modelspec", "tokenizer"},
    {"images", "quant", "template"},
    {"ops"},
    {"nn"},
    {"sampling"},
    {"engine", "loader"},
    {"parallel", "speculate"},
    {"api"},
    {"jinfer", "views"},
    {"cli"},
    {"server", "generate", "serve", "client", "look", "tools", "__main__"},
]
LEVEL_OF = {unit: level for level, units in enumerate(LEVELS) for unit in units}
# Who has the plain references that stand beside kernels.
USERS = {"loader", "ops", "quant", "cli", "tools"}

# The second and third only make golden files, the first comes along with Flax.
FORBIDDEN_IMPORTS = {"optax", "torch", "transformers"}

# Units that import JAX or Flax at the top of a module: what compiles and what computes. The others
# import it in a function, if at all, so that help, flags and refusals need not wait for it.
JAX_UNITS = {
    "api",
    "cpu",
    "engine",
    "kernels_pallas",
    "loader",
    "matmul_precision",
    "nn",
    "ops",
    "parallel",
    "quant",
    "sampling",
    "speculate",
    "tools",
}
# Modules that read JAX's private parts, and why. Nothing replaces them.
PRIVATE_JAX = {
    "jinfer/parallel/distributed/collective_address.py": "the address of gloo's sockets",
    "jinfer/parallel/distributed/job_config.py": "clusters that JAX detects",
    "jinfer/engine/runner/aot_serialization.py": "executables that were not compiled here",
    "jinfer/engine/runner/program_cache.py": "a thread's setting of the compilation cache",
    "jinfer/ops/cpu_library.py": "whether XLA has started",
    "jinfer/engine/runner/executable.py": "calls without JAX's dispatch",
}

# Modules that name others in strings, which are imported later, and why.
NAMES_IN_STRINGS = {
    "jinfer/cli/entry_point.py": "a command is imported when it runs",
    "jinfer/cli/prog_name.py": "the name of the module that runs is compared, not imported",
}

MAX_LINES = 600
LONG_MODULES: dict[str, str] = {}  # path -> why it is better whole

MAX_FLOORS = 10
MAX_FILES = 25  # modules in a folder of jinfer/server
# Packages whose sub-folders import each other, and why.
FOLDER_CIRCLES: dict[str, str] = {}
# Folders in which a file of the same name has the same subject.
MIRRORS = [
    {"kernels_pallas/attention", "kernels_pallas/matmul"},  # triton, grid
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


def names_in_strings(root: Path) -> dict[str, list[str]]:
    """Modules that name, in a string, a module of a unit that they may not import."""
    names = {".".join(dotted_name(root, path)) for path in source_files(root)}
    found: dict[str, list[str]] = {}
    for path in source_files(root):
        importer, file = unit_of(root, dotted_name(root, path)), str(path.relative_to(root))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if not re.fullmatch(r"\w+(\.\w+)+", node.value):
                continue
            parts = re.sub(r"^jinfer\.tools\b", "tools", node.value).split(".")
            name = next((n for n in (parts, parts[:-1]) if ".".join(n) in names), None)
            named = unit_of(root, name) if name else None
            if importer is None or named is None or named == importer:
                continue
            forbidden = named in KERNELS and importer not in USERS
            if forbidden or LEVEL_OF.get(named, 0) > LEVEL_OF.get(importer, 0):
                found.setdefault(file, []).append(f"{file}:{node.lineno}: names {node.value}")
    return found


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


def folder_circles(root: Path) -> dict[str, str]:
    """Circles of a package's modules and sub-folders, by package.

    A sub-folder counts as one, so that folders can be read one after another.
    """
    modules = module_graph(root)
    packages: dict[str, dict[str, set[str]]] = {}
    for module, imported in modules.items():
        parts = module.split(".")
        for depth in range(1, len(parts)):
            package, child = ".".join(parts[:depth]), parts[depth]
            inside = [name.split(".") for name in imported if name.startswith(f"{package}.")]
            children = packages.setdefault(package, {}).setdefault(child, set())
            children |= {name[depth] for name in inside} - {child}
    found = {}
    for package, graph in packages.items():
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            found[package] = " -> ".join(error.args[1])
    return found


def crowded_folders(root: Path, folder: str) -> list[str]:
    """Folders below `folder` with more than `MAX_FILES` modules."""
    counts = collections.Counter(path.parent for path in (root / folder).rglob("*.py"))
    return [
        f"{path.relative_to(root)}: {count} modules"
        for path, count in sorted(counts.items())
        if count > MAX_FILES
    ]


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
    folders = {".".join(path.parent.relative_to(root).parts) for path in source_files(root)}
    return sorted(folders - set(listed) - {"tools"})
