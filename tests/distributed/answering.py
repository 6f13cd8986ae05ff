"""A process of a job that answers what tests ask; process 0 prints the answers as JSON.

Run as `python -m tests.distributed.answering CASES`, with the flags of a job or alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jinfer import LLM, SamplingParams
from jinfer.api.job_processes import run_job, run_worker
from jinfer.distributed.job_config import FLAGS, find_job
from tests.parallel.eight.check_engine import asked, nothing_held, tokens
from tests.parallel.eight.models import GOLDENS, answers, prompts

# More than one model after the other, in the order of the cases.
Cases = Sequence[Mapping[str, Any]]


def keys_of(case: Mapping[str, Any]) -> dict[str, Any]:
    """What a golden is opened with."""
    return {"dtype": "float32", **case["keys"]}


def plain(llm: LLM) -> Any:
    """Greedy and seeded tokens, and logits."""
    found = answers(llm)
    return {"tokens": found.tokens, "logits": [each.tolist() for each in found.logits]}


def together(llm: LLM) -> Any:
    """Sixteen requests at a time, twice; nothing is left over."""
    requests = asked(16)
    found = [tokens(llm, requests), tokens(llm, requests)]
    return {"tokens": found, "left": not nothing_held(llm)}


def strategies(llm: LLM) -> Any:
    """Ways to choose that are not a token after the other; scores, vectors."""
    given = prompts(llm)
    ways = [
        SamplingParams(strategy="beam", beams=3, max_tokens=6, ignore_eos=True),
        SamplingParams(strategy="contrastive", top_k=3, max_tokens=6, ignore_eos=True),
        SamplingParams(strategy="fsd", max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3),
    ]
    chosen = [[list(each.token_ids) for each in llm.generate(given, way)] for way in ways]
    numbers = [*llm.score(given), *llm.hidden(given), *llm.embed(given)]
    return {"tokens": chosen, "logits": [np.asarray(each).tolist() for each in numbers]}


def chances(llm: LLM) -> Any:
    """Some ids alone, several answers of a prompt, a sampler that keeps a number."""
    given = prompts(llm)
    ways = [
        SamplingParams(temperature=1.0, seed=4, max_tokens=6, allowed_token_ids=[7, 8, 9, 10]),
        SamplingParams(temperature=0.8, seed=1, n=2, max_tokens=5, logprobs=2, ignore_eos=True),
        SamplingParams(mirostat=2, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True),
    ]
    return {"tokens": [[list(a.token_ids) for a in llm.generate(given, way)] for way in ways]}


ASKED = {"chances": chances, "plain": plain, "together": together, "strategies": strategies}


def lead(cases: Cases) -> int:
    """Answers, in process 0 or alone."""
    found = []
    for case in cases:
        with LLM(GOLDENS / case["golden"], **keys_of(case)) as llm:
            found.append(ASKED[case["ask"]](llm))
    print(json.dumps(found))
    return 0


def follow_all(cases: Cases) -> None:
    """Follows process 0 through all of them."""
    for case in cases:
        run_worker(Path(GOLDENS / case["golden"]), keys_of(case))


def main() -> int:
    """One process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=json.loads)
    for name in FLAGS:
        parser.add_argument(f"--{name}")
    options = parser.parse_args()
    job = find_job(vars(options), {})
    if job is None:
        return lead(options.cases)
    return run_job(job, lambda: lead(options.cases), lambda: follow_all(options.cases))


if __name__ == "__main__":
    sys.exit(main())
