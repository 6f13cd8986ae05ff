"""Slow tests: the list of test functions of which `make test` runs a quarter each day.

`slow_tests.txt` has the functions that took half a second or more, the longest first, with the
seconds of all variants that ran. Every fourth line is a day's share: shares take about the same
time.
After tests have changed:

    PYTEST_ADDOPTS=--junitxml=report.xml make test
    python -m tests.slow_tests report.xml
"""

import argparse
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

LIST = Path(__file__).with_name("slow_tests.txt")
DAYS = 4
LEAST = 0.5  # seconds
# The short way from a checkpoint to tokens, and the structure: every day.
ALWAYS = ("tests/test_goldens.py", "tests/test_smollm2.py", "tests/test_structure.py")
# A function that runs tests in a process of its own, of which it leaves out the slow ones itself.
RUNNER = "tests/parallel/test_eight.py::test_eight_devices"


def read() -> dict[str, float]:
    """Seconds of each slow function, the longest first."""
    rows = (line.split() for line in LIST.read_text(encoding="utf-8").splitlines())
    return {name: float(seconds) for seconds, name in rows}


def left_out(slow: Iterable[str], seed: int) -> set[str]:
    """Of slow functions, those that are not in the share of the day `seed`."""
    return {name for n, name in enumerate(slow) if n % DAYS != seed % DAYS}


def measured(report: Path) -> dict[str, float]:
    """Seconds of each function of a JUnit report, with all its variants."""
    seconds = defaultdict[str, float](float)
    for case in ET.parse(report).getroot().iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        function = case.get("name", "").partition("[")[0]
        seconds[f"{file}::{function}"] += float(case.get("time", "0"))
    return seconds


def main(arguments: list[str]) -> None:
    """Adds what reports measured to the list; functions that they lack keep their seconds."""
    parser = argparse.ArgumentParser(prog="python -m tests.slow_tests")
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.xml")
    rows = read() if LIST.exists() else {}
    for report in parser.parse_args(arguments).reports:
        rows |= measured(report)
    slow = sorted((-round(t, 1), name) for name, t in rows.items() if _may_rest(name, t))
    text = "".join(f"{-seconds:.1f} {name}\n" for seconds, name in slow)
    LIST.write_text(text, encoding="utf-8")


def _may_rest(name: str, seconds: float) -> bool:
    return seconds >= LEAST and name != RUNNER and not name.startswith(ALWAYS)


if __name__ == "__main__":
    main(sys.argv[1:])
