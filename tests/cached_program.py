"""A program with all caches: `python -m tests.cached_program FOLDER` prints an answer's tokens."""

import sys
from pathlib import Path

from jinfer import LLM
from jinfer.loader.weights import quantized_cache

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Opens a tiny model whose quantized weights, programs and prefixes are kept in a folder."""
    quantized_cache._LEAST_WEIGHTS = 0
    keys = {"cache_disk": f"{sys.argv[1]}/prefixes", "cache_disk_size": 0.01, "kv_tokens": 512}
    with LLM(
        ROOT / "tests" / "goldens" / "llama2", quantization={"weights": "q4"}, engine=keys
    ) as llm:
        print("begun", flush=True)
        for first in (1, 2, 3):
            prompt = [first, *range(5, 185)]
            print(llm.generate([prompt], max_tokens=6, ignore_eos=True)[0].token_ids, flush=True)


if __name__ == "__main__":
    main()
