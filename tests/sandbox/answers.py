"""Functions that the processes of test_sandboxed_process.py call."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any


def answer(question: Any) -> Any:
    """Does what a hostile question would make a library do."""
    match question:
        case "loop":
            while True:
                pass
        case "memory":
            return len(bytes(1 << 30))
        case "crash":
            os.abort()
        case "print":
            print("this is no answer", flush=True)
            return sorted(name for name in sys.modules if name in ("jax", "jinfer.api.llm"))
        case "write":
            with tempfile.TemporaryFile() as file:
                file.write(b"x")
        case "long":
            return "x" * 2000
        case "deep":
            return answer_deep(0)
    return question


def answer_deep(depth: int) -> int:
    """Never ends."""
    return answer_deep(depth + 1)
