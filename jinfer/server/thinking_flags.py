"""Values of the flags about thinking: variables of chat templates, a thinking budget."""

from __future__ import annotations

import argparse
import json
from typing import Any

from jinfer.server.flag_types import count
from jinfer.server.server_settings import RESERVED_VARIABLES


def budget(text: str) -> int | None:
    """A number of tokens; -1: None."""
    value = count(text, least=-1)
    return None if value == -1 else value


def template_variables(text: str) -> dict[str, Any]:
    """The variables of a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not a JSON object")
    if reserved := sorted(RESERVED_VARIABLES & value.keys()):
        raise argparse.ArgumentTypeError(f"{reserved[0]} is set by each request")
    return value
