"""Notebooks of docs/notebooks, run without Jupyter: one process, one namespace each.

`python -m tests.notebooks [NAME...]` runs them and writes their outputs into the files.
"""

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"

type Json = dict[str, Any]


def notebooks() -> list[Path]:
    """All of them, in order."""
    return sorted(FOLDER.glob("*.ipynb"))


def code_cells(notebook: Json) -> list[Json]:
    """The cells with code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: Json) -> Iterator[list[Json]]:
    """Runs each code cell in turn; gives its outputs, as a notebook file has them.

    As IPython does: the value of a last line that is an expression is displayed, unless it is None
    or ends in a semicolon.
    """
    namespace: Json = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook), start=1):
        source = "".join(cell["source"])
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            value = _execute(source, f"<cell {number}>", namespace)
        outputs = list[Json]()
        if text := printed.getvalue():
            outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(text)})
        if value is not None and not source.rstrip().endswith(";"):
            outputs.append(
                {
                    "data": displayed(value),
                    "execution_count": number,
                    "metadata": {},
                    "output_type": "execute_result",
                }
            )
        yield outputs


def _execute(source: str, name: str, namespace: Json) -> Any:
    body = ast.parse(source, name).body
    last = body[-1] if body else None
    if not isinstance(last, ast.Expr):
        exec(compile(ast.Module(body, []), name, "exec"), namespace)
        return None
    exec(compile(ast.Module(body[:-1], []), name, "exec"), namespace)
    return eval(compile(ast.Expression(last.value), name, "eval"), namespace)


def displayed(value: Any) -> dict[str, list[str]]:
    """A value by the type of its text."""
    data = {"text/plain": _lines(repr(value))}
    if (html := getattr(value, "_repr_html_", None)) is not None:
        data["text/html"] = _lines(html())
    return dict(sorted(data.items()))


def _lines(text: str) -> list[str]:
    for folder in (Path.cwd(), FOLDER.parents[1]):  # paths of this machine
        text = text.replace(f"{folder}{os.sep}", "")
    return text.splitlines(keepends=True)


@contextlib.contextmanager
def empty_folder() -> Iterator[None]:
    """Notebooks write files; here into a folder that is removed."""
    with tempfile.TemporaryDirectory(prefix="notebook") as folder, contextlib.chdir(folder):
        yield


def main(arguments: Sequence[str]) -> None:
    """Runs the notebooks whose names begin so, or all, and keeps their outputs."""
    for path in notebooks():
        if arguments and not path.name.startswith(tuple(arguments)):
            continue
        began = time.perf_counter()
        notebook = json.loads(path.read_text(encoding="utf-8"))
        with empty_folder():
            every, last = [], began
            for outputs in run(notebook):
                every.append(outputs)
                last, before = time.perf_counter(), last
                print(f"  {len(every):2}  {last - before:5.1f} s", flush=True)
        for number, (cell, outputs) in enumerate(zip(code_cells(notebook), every, strict=True), 1):
            cell["outputs"], cell["execution_count"] = outputs, number
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")
        print(f"{path.name}: {time.perf_counter() - began:.1f} s, {len(text) / 1000:.0f} kB")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main(sys.argv[1:])
