"""The list of slow tests: shares of days, names, and how it is made."""

from pathlib import Path

import pytest

from tests import slow_tests

ROOT = Path(__file__).parents[1]


def test_every_slow_test_has_its_day() -> None:
    slow = slow_tests.read()
    rest = [slow_tests.left_out(slow, seed) for seed in range(slow_tests.DAYS)]
    assert all(sum(name in names for names in rest) == slow_tests.DAYS - 1 for name in slow)


def test_days_take_about_the_same_time() -> None:
    slow = slow_tests.read()
    total = sum(slow.values())
    for seed in range(slow_tests.DAYS):
        rest = sum(slow[name] for name in slow_tests.left_out(slow, seed))
        assert total - rest == pytest.approx(total / slow_tests.DAYS, rel=0.15)


def test_listed_functions_exist() -> None:
    for name in slow_tests.read():
        file, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), name


def test_a_report_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, report = tmp_path / "slow.txt", tmp_path / "report.xml"
    listed.write_text("9.0 tests/test_b.py::test_y\n3.0 tests/a/test_a.py::test_x\n")
    cases = [("a.test_a", "test_x[1]", 0.6), ("a.test_a", "test_x[2]", 0.5)]
    cases += [("a.test_a", "test_fast", 0.4), ("test_goldens", "test_logits", 7.0)]
    rows = "".join(f'<testcase classname="tests.{c}" name="{n}" time="{t}"/>' for c, n, t in cases)
    report.write_text(f"<testsuites><testsuite>{rows}</testsuite></testsuites>")
    monkeypatch.setattr(slow_tests, "LIST", listed)
    slow_tests.main([str(report)])
    assert listed.read_text() == "9.0 tests/test_b.py::test_y\n1.1 tests/a/test_a.py::test_x\n"
