"""Tool-call and reasoning formats that `[prompt]` can name.

Their parsers are in `jinfer.server.tool_parsers`; a test checks that each name has one.
"""

from __future__ import annotations

from typing import Literal

ToolCalls = Literal[
    "auto",
    "hermes",
    "qwen_coder",
    "llama",
    "mistral",
    "deepseek",
    "dsml",
    "granite",
    "phi",
    "command",
    "harmony",
]
Reasoning = Literal["auto", "none", "think", "mistral", "command", "seed"]
