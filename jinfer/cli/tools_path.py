"""Import path of tools: the folder `tools` of a checkout as the package `jinfer.tools`."""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path


def provide_tools() -> None:
    """Makes `jinfer.tools` importable in a checkout, where the folder is beside the package."""
    name = "jinfer.tools"
    if name in sys.modules or find_spec(name) is not None:
        return
    folder = Path(__file__).parents[2] / "tools"
    start = folder / "__init__.py"
    if not start.is_file():
        return
    spec = spec_from_file_location(name, start, submodule_search_locations=[str(folder)])
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
