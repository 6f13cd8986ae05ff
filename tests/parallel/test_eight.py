"""On eight virtual devices, of which XLA has to know before it starts: in processes of their own.

The tests that these run are in tests/parallel/eight/check_*.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKS = sorted((ROOT / "tests" / "parallel" / "eight").glob("check_*.py"))


def run_on_eight(*arguments: str | Path) -> None:
    """Runs the tests of files on eight virtual devices."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    # What tells xdist's workers who they are is not for a process of its own.
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    usual = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *usual, *map(str, arguments)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_eight_devices(request: pytest.FixtureRequest) -> None:
    """All in one process, in which files share what one device gives."""
    assert CHECKS
    some = ["--some-variants"] if request.config.getoption("--some-variants") else []
    run_on_eight(*CHECKS, *some)


@pytest.mark.soak
@pytest.mark.parametrize("path", CHECKS, ids=[path.stem for path in CHECKS])
def test_all_of_it(path: Path) -> None:
    run_on_eight(path, "-m", "soak or not soak")
