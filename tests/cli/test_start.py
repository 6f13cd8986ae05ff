"""Commands that start again import no JAX unless something needs it, and answer as ever."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from jinfer.cpu import build_library
from tests.xla.processes import needs_known, run

GOLDENS = Path(__file__).parents[1] / "goldens"

pytestmark = [
    needs_known,
    pytest.mark.skipif(not build_library.available(), reason="no C++ compiler"),
]

# Runs a command, and says whether JAX was imported for it.
COMMAND = """
import contextlib, io, runpy, sys
said = io.StringIO()
with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
    sys.argv[0] = sys.argv.pop(1)
    runpy.run_module(sys.argv[0], run_name="__main__")
print(said.getvalue().replace("\\n", " "))
print("jax._src" in sys.modules)
"""
QUICK = {  # to compile
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
}
# What its first answer below needs is kept.
WARM = """
import sys
from jinfer.xla.later import imported
with imported():
    from jinfer import LLM
llm = LLM(sys.argv[1], **{"engine.slots": 2})
llm.generate([[5, 9, 2]], max_tokens=4, temperature=0, ignore_eos=True)
"""
# What a model gives that needs JAX for some of it, asked in two threads while it is imported.
MIXED = """
import sys, threading
if sys.argv[2] == "later":
    from jinfer.xla.later import imported, is_postponed
    with imported():
        from jinfer import LLM
    assert is_postponed()
else:
    from jinfer import LLM
llm = LLM(sys.argv[1], **{"engine.slots": 2})
how = dict(temperature=0, ignore_eos=True)
first = llm.generate([[5, 9, 2]], max_tokens=4, **how)[0].token_ids
if sys.argv[2] == "later":
    assert is_postponed()
answers = {}
def answer():
    answers["long"] = llm.generate([[5, 9, 2, 7]], max_tokens=200, **how)[0].token_ids
thread = threading.Thread(target=answer)
thread.start()
answers["logits"] = [round(float(x), 3) for x in llm.logits([[5, 9, 2, 77]])[0][-1][:8]]
answers["score"] = [round(float(x), 3) for x in llm.score([[5, 9, 2, 77, 31]])[0]]
thread.join()
beams = llm.generate([[5, 9]], strategy="beam", beams=2, max_tokens=4)[0].token_ids
print(first, answers["long"], answers["logits"], answers["score"], beams)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache folder with nothing but the custom calls in it."""
    folder: Path = tmp_path_factory.mktemp("cache")
    library = build_library.library_path()
    kept = shutil.copytree(library.parent, folder / "custom_calls" / library.parent.name)
    for path in (kept.parent, kept, kept / library.name):
        path.chmod(0o700)
    return str(folder)


def command(cache: str, *words: str) -> tuple[str, bool]:
    """What a command prints, and whether JAX was imported for it."""
    text, imported = run(COMMAND, *words, JINFER_CACHE=cache, **QUICK).splitlines()
    return text, imported == "True"


@pytest.mark.parametrize("golden", ["llama2", "t5"])
def test_generate(cache: str, golden: str) -> None:
    words = ["jinfer.generate", str(GOLDENS / golden), "--ids", "5 9 2 77", "--max-tokens", "8"]
    words += ["--set", "quantization.kv_cache=q8", "--set", "engine.slots=1", "--json"]
    (first, made), (second, imported) = (command(cache, *words) for _ in range(2))
    assert made
    assert not imported
    answers = [json.loads(text)["token_ids"] for text in (first, second)]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 8


def test_a_start_that_needs_it_after_a_while(cache: str) -> None:
    """Its answers are those of a process that had JAX from the beginning."""
    golden = str(GOLDENS / "llama2")
    plain = run(MIXED, golden, "now", JINFER_CACHE=cache, **QUICK)
    run(WARM, golden, JINFER_CACHE=cache, **QUICK)
    assert run(MIXED, golden, "later", JINFER_CACHE=cache, **QUICK) == plain


def test_help_imports_nothing() -> None:
    script = f"{COMMAND}\nprint('numpy' in sys.modules)"
    *_, imported, numpy = run(script, "jinfer.generate", "--help").splitlines()
    assert (imported, numpy) == ("False", "False")
