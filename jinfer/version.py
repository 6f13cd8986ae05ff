"""Version of the jinfer package."""

import tomllib
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path


def find_version(package: Path) -> str:
    """The version of the package in a folder: the checkout's, else the installed one.

    A checkout comes first, because another version may be installed too.
    """
    try:
        project = tomllib.loads((package.parent / "pyproject.toml").read_text("utf-8"))["project"]
        if project["name"] == "jinfer":
            return str(project["version"])
    except (OSError, ValueError, KeyError):  # not a checkout of jinfer
        pass
    try:
        return installed("jinfer")
    except PackageNotFoundError:  # the files were copied without an installation
        return "unknown"


__version__ = find_version(Path(__file__).parent)
