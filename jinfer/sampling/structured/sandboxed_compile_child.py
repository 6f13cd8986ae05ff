"""Compiles grammars in a process of its own, which a hostile one may exhaust; run by `trial`.

It imports nothing of jinfer, so that it starts at once. Reads {"grammars", "limits", "seconds",
"bytes"} from its input; writes a list of llguidance's messages, empty for grammars that are fine.
"""

import json
import os
import resource
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer


def _main() -> None:
    os.nice(10)  # whoever answers meanwhile goes first
    asked = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (asked["seconds"], asked["seconds"] + 1))
    resource.setrlimit(resource.RLIMIT_AS, (asked["bytes"], asked["bytes"]))
    limits = LLParserLimits(**asked["limits"])
    trie = LLTokenizer("byte")
    messages = []
    for grammar in asked["grammars"]:
        matcher = LLMatcher(trie, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        messages.append(matcher.get_error())
    json.dump(messages, sys.stdout)


if __name__ == "__main__":
    _main()
