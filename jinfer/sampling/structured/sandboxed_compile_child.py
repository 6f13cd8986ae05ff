"""Child process of `sandboxed_compile`: compiles grammars, a hostile one of which may exhaust it.

It imports nothing of jinfer, so that it starts at once. Reads {"grammars", "limits", "seconds",
"bytes"} from its input; writes a list of llguidance's messages, empty for grammars that are fine.
"""

import json
import os
import resource
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer


def _main() -> None:
    os.nice(10)  # the server's threads come first
    job = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (job["seconds"], job["seconds"] + 1))
    resource.setrlimit(resource.RLIMIT_AS, (job["bytes"], job["bytes"]))
    limits = LLParserLimits(**job["limits"])
    trie = LLTokenizer("byte")
    messages = []
    for grammar in job["grammars"]:
        matcher = LLMatcher(trie, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        messages.append(matcher.get_error())
    json.dump(messages, sys.stdout)


if __name__ == "__main__":
    _main()
