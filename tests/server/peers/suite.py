"""A service's tests as a table of cases: subject, whether it holds here, and why not."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

type Check = Callable[[Any], object]


@dataclass(frozen=True)
class Case:
    """A test of a file, or several similar tests.

    Attributes:
        file: of the service.
        asked: what is asked for.
        count: tests of that file, each set of parameters counted.
        check: raises if a server does not answer so; None: it does not apply here.
        why: why it does not apply, or does not hold; "": it holds.
    """

    file: str
    asked: str
    count: int
    check: Check | None
    why: str = ""

    @property
    def holds(self) -> bool:
        """Whether a server has to answer so."""
        return self.check is not None and not self.why


@dataclass(frozen=True)
class Suite:
    """The tests of a service.

    Attributes:
        name: of the service.
        cases: in the order of its files.
    """

    name: str
    cases: list[Case] = field(default_factory=list)

    def case(self, file: str, count: int, asked: str, why: str = "") -> Callable[[Check], Check]:
        """Adds a case; `why`: why it does not hold, which is tried, too."""

        def add(check: Check) -> Check:
            self.cases.append(Case(file, asked, count, check, why))
            return check

        return add

    def apart(self, file: str, count: int, asked: str, why: str) -> None:
        """Adds what does not apply."""
        self.cases.append(Case(file, asked, count, None, why))

    def applying(self) -> int:
        """How many tests apply."""
        return sum(case.count for case in self.cases if case.check is not None)

    def holding(self) -> int:
        """How many of them hold."""
        return sum(case.count for case in self.cases if case.holds)

    def run(self, servers: Any) -> list[str]:
        """Run all cases; return the deviations from the table."""
        return [line for case in self.cases if (line := _tried(case, servers))]

    def rows(self) -> Iterator[tuple[str, str, str, str, str]]:
        """File, tests, those that apply, those that hold, and why not."""
        for file in dict.fromkeys(case.file for case in self.cases):
            of = [case for case in self.cases if case.file == file]
            apply = sum(item.count for item in of if item.check is not None)
            holding = sum(item.count for item in of if item.holds)
            reasons = [
                f"{item.asked} ({item.count}): {'' if item.check else 'does not apply: '}{item.why}"
                for item in of
                if item.why
            ]
            count = sum(item.count for item in of)
            yield f"`{file}`", str(count), str(apply), str(holding), "; ".join(reasons)

    def table(self) -> str:
        """The table of its files."""
        counts = [str(sum(case.count for case in self.cases))]
        counts += [str(self.applying()), str(self.holding())]
        share = f"{100 * self.holding() / self.applying():.1f}% of those that apply"
        rows = [*self.rows(), ("all", *counts, share)]
        head = ["| file | tests | apply | hold | what does not hold or apply, and why |"]
        return "\n".join([*head, "|---|---|---|---|---|", *(f"| {' | '.join(r)} |" for r in rows)])


def _tried(item: Case, servers: Any) -> str:
    if item.check is None:
        return ""
    try:
        item.check(servers)
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return f"{item.file}: {item.asked}: {said}" if item.holds else ""
    return "" if item.holds else f"{item.file}: {item.asked}: it holds by now"
