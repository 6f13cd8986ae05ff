"""Child process of `constraint.compile_sandboxed`: compiles grammars that may exhaust it."""

from __future__ import annotations

import os
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer


def answer(question: tuple[list[str], dict[str, Any]]) -> list[str]:
    """Compiles grammars within limits; returns llguidance's messages, "" for valid grammars."""
    os.nice(10)  # the server's threads come first
    grammars, limits = question
    trie = LLTokenizer("byte")
    messages = []
    for grammar in grammars:
        matcher = LLMatcher(trie, grammar, log_level=0, limits=LLParserLimits(**limits))
        if not matcher.is_error():
            matcher.compute_bitmask()
        messages.append(matcher.get_error())
    return messages
