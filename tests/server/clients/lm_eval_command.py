"""lm-eval, with the tokenizer of the server."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.server.clients.checks import Checks, Server

CHECKS = Checks()
ROWS = [
    {"q": "The capital of France is", "choices": ["Paris", "Rome"], "gold": 0},
    {"q": "One, two, three,", "choices": ["seven", "four"], "gold": 1},
]
TASKS: dict[str, dict[str, Any]] = {
    "own_choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    },
    "own_text": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
    "own_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{q}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}


def evaluate(server: Server, task: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        rows = path / "rows.jsonl"
        rows.write_text("".join(f"{json.dumps(item)}\n" for item in ROWS))
        common = {
            "task": task,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(rows)}},
            "test_split": "test",
            "doc_to_text": "{{q}}",
        }
        (path / f"{task}.yaml").write_text(json.dumps({**common, **TASKS[task]}))
        address = f"{server.url}/completions"
        model = f"model={server.model},base_url={address},tokenizer_backend=remote,max_retries=1"
        done = subprocess.run(
            [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions",
             "--model_args", model, "--tasks", task, "--include_path", folder,
             "--output_path", str(path / "out"), "--batch_size", "1"],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": folder},
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-600:]
        (found,) = (path / "out").rglob("results_*.json")
        return dict(json.loads(found.read_text())["results"][task])


@CHECKS
def multiple_choice(server: Server) -> None:
    assert evaluate(server, "own_choice")["acc,none"] == 1


@CHECKS
def generate_until(server: Server) -> None:
    assert "exact_match,none" in evaluate(server, "own_text")


@CHECKS
def loglikelihood_rolling(server: Server) -> None:
    assert 1 < evaluate(server, "own_rolling")["word_perplexity,none"] < 1e6
