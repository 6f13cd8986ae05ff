"""No command waits for more than a second without a word on a terminal, also the first time."""

import shutil
from pathlib import Path

import pytest

from jinfer.cpu import build_library
from tests.cli.listening import listen

ROOT = Path(__file__).parents[2]
LLAMA2 = str(ROOT / "tests" / "goldens" / "llama2")
QUICK = {  # to compile
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the custom calls in it."""
    folder: Path = tmp_path_factory.mktemp("cache")
    library = build_library.library_path()
    kept = shutil.copytree(library.parent, folder / "libraries" / library.parent.name)
    for path in (kept.parent, kept, kept / library.name):
        path.chmod(0o700)
    return folder


@pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")
def test_a_first_answer(cache: Path) -> None:
    words = ["jinfer", "generate", LLAMA2, "--ids", "5 9 2", "--max-tokens", "4", "--json"]
    heard = listen(words, "", ROOT, JINFER_CACHE=str(cache), **QUICK)
    assert heard.status == 0, heard.text
    assert heard.silence <= heard.most, (heard.silence, heard.before)
    assert "starting" in heard.text


@pytest.mark.soak
@pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")
def test_a_first_answer_on_a_new_machine(tmp_path: Path) -> None:
    """With nothing in the cache: the custom calls are compiled, and every program."""
    words = ["jinfer", "generate", "smollm2_135m_instruct", "Why is the sky blue?"]
    heard = listen([*words, "--max-tokens", "8"], "", ROOT, JINFER_CACHE=str(tmp_path))
    assert heard.status == 0, heard.text
    assert heard.silence <= heard.most, (heard.silence, heard.before)
    assert "compiling custom calls for" in heard.text
