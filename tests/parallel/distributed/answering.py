"""A process of a job for tests; process 0 prints the results of calls as JSON.

Run as `python -m tests.parallel.distributed.answering CASES`, with the flags of a job or alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinfer import LLM
from jinfer.api.job_processes import run_job, run_worker
from jinfer.parallel.distributed.job_config import FLAGS, find_job
from tests.parallel.eight.models import CALLS, GOLDENS

# More than one model after the other, in the order of the cases.
Cases = Sequence[Mapping[str, Any]]


def keys_of(case: Mapping[str, Any]) -> dict[str, Any]:
    """What a golden is opened with."""
    return {"dtype": "float32", **case["keys"]}


def lead(cases: Cases) -> int:
    """Answers, in process 0 or alone."""
    found = []
    for case in cases:
        with LLM(GOLDENS / case["golden"], **keys_of(case)) as llm:
            found.append(CALLS[case["call"]](llm))
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
