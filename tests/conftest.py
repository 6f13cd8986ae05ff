"""What every test starts from: JAX's strict settings, a compilation cache, the golden files."""

import gc
import os
import signal
import tempfile
import zlib
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import hypothesis
import pytest

from tests import slow_tests


def _cache_directory() -> str:
    """A folder of this user alone, so that nobody else on the machine can plant programs in it."""
    path = Path(tempfile.gettempdir()) / f"jinfer-tests-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        return tempfile.mkdtemp(prefix="jinfer-tests-")
    return str(path)


# The environment rather than jax.config, so that programs started by a test have the same
# settings; JAX reads it when it is first imported, which a conftest always precedes.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _cache_directory())
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.03")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Compiling is most of the work of the tests, and LLVM's optimizations are a third of that. Tests in
# which these decide something take the fixture `optimized`; `make soak` runs all tests with them.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
# One library of custom calls, for every set of instructions that tests lower themselves to.
os.environ.setdefault("JINFER_EVERY_ISA", "1")
# Several processes test at a time; NumPy's threads would only wait for one another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Each size of a batch is a program to compile. Results are the same to the bit in any of them, so
# a few do, but for `make soak`: one token, few, and many. Set before anyone imports them.
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1":
    from jinfer.engine.runner import model_runner

    model_runner.SMALL_SIZES, model_runner.SIZES = (1, 8), (96,)

# Traces leave much behind that is no garbage: looking through it took 3% of the time.
gc.set_threshold(50_000, 20, 100)

# A shell's background jobs ignore Ctrl-C, and so would the programs that tests press it in.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: a first example may compile. The same examples every time, so that a failure is the
# change's and not chance's; `make soak` takes new ones (--hypothesis-profile random).
hypothesis.settings.register_profile("same", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.register_profile("random", deadline=None, print_blob=True)
hypothesis.settings.load_profile("same")


# Files that take longest, which begin first: at the end the others fill what time is left.
LONGEST = (
    *("tests/parallel/test_eight.py", "tests/test_goldens.py", "tests/test_docs.py"),
    *(
        "tests/kernels_pallas/test_paged_attention.py",
        "tests/parallel/distributed/",
        "tests/test_lifetime.py",
    ),
    *("tests/speculate/", "tests/engine/", "tests/server/", "tests/ops/", "tests/test_wheel.py"),
)


# Of a test's variants in these folders, which take most time, `make test` runs one in so many. They
# are chosen by a seed, another one each day, so that all have had their turn after some days. It is
# in the environment for the processes of pytest-xdist, which have to agree.
SEED = "JINFER_TEST_VARIANTS"
os.environ.setdefault(SEED, str(date.today().toordinal()))
ONE_IN = {
    "tests/parallel/eight/": 24,
    "tests/test_docs.py::test_a_command_runs": 4,
    "tests/test_docs.py::test_a_block_of_python_runs": 3,
    "tests/test_goldens.py::test_hidden_states": 4,
    "tests/test_goldens.py::test_streams_after_layers": 24,
    "tests/test_goldens.py::test_contributions_add_up_to_the_stream": 24,
    "tests/test_activations.py::test_every_value": 2,
    "tests/test_activations.py::test_names_are_what_a_trace_has": 3,
    "tests/test_activations.py::test_values_of_quantized_weights": 2,
    "tests/test_activations.py::test_contributions_of_an_encoder_decoder": 2,
    "tests/views/test_looking.py::test_an_attribution_is_of_what_is_added": 3,
    "tests/test_goldens.py::test_greedy_tokens": 2,
    **{f"tests/{folder}/": 3 for folder in ("checkpoint", "cpu", "parallel", "quant", "tools")},
    "tests/families/test_multimodal.py": 6,
    "tests/families/test_architectures.py": 24,
    "tests/families/": 3,
    "tests/families/test_second_checkpoints.py": 36,
    "tests/server/": 4,
    **{f"tests/{folder}/": 5 for folder in ("speculate", "weights")},
    "tests/test_pure_function.py::test_logits_of_decoders": 90,
    "tests/test_pure_function.py::test_hidden_states_of_encoders": 12,
    "tests/test_pure_function.py::test_logits_of_encoder_decoders": 5,
    "tests/test_pure_function.py::test_derivatives": 5,
    "tests/test_pure_function.py::test_lora_beside_any_matrix": 3,
    "tests/test_classification.py": 2,
    "tests/test_notebooks.py::test_a_notebook_runs": 7,
    "tests/template/test_bounds.py": 3,
    "tests/engine/test_batch_invariance.py": 100,
    **{f"tests/{folder}/": 8 for folder in ("engine", "ops", "sampling")},
    "tests/kernels_pallas/": 16,
}


def pytest_report_header(config: pytest.Config) -> str:
    """How to have the same variants again."""
    some = config.getoption("--some-variants")
    return f"variants: {SEED}={os.environ[SEED]}" if some else "variants: all"


def pytest_addoption(parser: pytest.Parser) -> None:
    some = "leave out variants of tests that have many: those of `make test`; `make soak` has all"
    parser.addoption("--some-variants", action="store_true", help=some)


@pytest.hookimpl(trylast=True)  # of what is left when markers have been looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is run, and the order in which processes get files, see `--no-loadscope-reorder`."""
    if config.getoption("--some-variants"):
        _leave_out(config, items)

    def rank(item: pytest.Item) -> int:
        found = (n for n, name in enumerate(LONGEST) if item.nodeid.startswith(name))
        return next(found, len(LONGEST))

    items.sort(key=rank)


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Other variants of each test, and other slow tests, with each seed."""
    seed = int(os.environ[SEED])
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = list[pytest.Item]()
    for name, each in variants.items():
        one_in = next((n for folder, n in ONE_IN.items() if name.startswith(folder)), 1)
        first = (zlib.crc32(name.encode()) + seed) % min(one_in, len(each))
        left_out += [item for n, item in enumerate(each) if n % one_in != first]
    for name in slow_tests.left_out(slow_tests.read(), seed):
        left_out += variants.get(name, [])
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


def pytest_collection_finish() -> None:
    """What is there for the whole run is no garbage to look through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _let_programs_go() -> Iterator[None]:
    """Each compiled program takes memory maps, of which a process has 65,530 on Linux.

    Until there are many they are left to the files that come after, which need small ones again.
    """
    yield
    import jax

    if _many_programs():
        from tests.compiling import forget_programs

        forget_programs()
        jax.clear_caches()
        gc.collect()


def _many_programs() -> bool:
    """Whether this process has a quarter of all memory maps, or 2 GiB; true where none can tell."""
    try:
        maps = Path("/proc/self/maps").read_bytes().count(b"\n")
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return True
    return maps > 15_000 or pages * os.sysconf("SC_PAGE_SIZE") > 2 << 30


@pytest.fixture(scope="module")
def optimized() -> Iterator[None]:
    """For a whole file: see `tests.compiling.optimized`."""
    from tests.compiling import optimized

    with optimized():
        yield


@pytest.fixture(scope="module")
def shared_programs() -> Iterator[None]:
    """For a whole file: see `tests.compiling.shared_programs`."""
    from tests.compiling import shared_programs

    with shared_programs():
        yield


@pytest.fixture(scope="session", autouse=True)
def _weights_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Weights that are kept for the next start are this run's: none of another version's."""
    from jinfer.loader.weights import quantized_cache

    folder = tmp_path_factory.mktemp("cache") / "weights"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_cache, "cache_folder", lambda name: folder)
        yield


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The folder of tiny checkpoints with the values that the reference implementations gave."""
    return Path(__file__).parent / "goldens"
