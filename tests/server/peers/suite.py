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
        return sum(one.count for one in self.cases if one.check is not None)

    def holding(self) -> int:
        """How many of them hold."""
        return sum(one.count for one in self.cases if one.holds)

    def run(self, servers: Any) -> list[str]:
        """Run all cases; return the deviations from the table."""
        return [line for one in self.cases if (line := _tried(one, servers))]

    def rows(self) -> Iterator[tuple[str, str, str, str, str]]:
        """File, tests, those that apply, those that hold, and why not."""
        for file in dict.fromkeys(one.file for one in self.cases):
            of = [one for one in self.cases if one.file == file]
            apply = sum(one.count for one in of if one.check is not None)
            holding = sum(one.count for one in of if one.holds)
            reasons = [
                f"{one.asked} ({one.count}): {'' if one.check else 'does not apply: '}{one.why}"
                for one in of
                if one.why
            ]
            count = sum(one.count for one in of)
            yield f"`{file}`", str(count), str(apply), str(holding), "; ".join(reasons)

    def table(self) -> str:
        """The table of its files."""
        counts = [str(sum(one.count for one in self.cases))]
        counts += [str(self.applying()), str(self.holding())]
        share = f"{100 * self.holding() / self.applying():.1f}% of those that apply"
        rows = [*self.rows(), ("all", *counts, share)]
        head = ["| file | tests | apply | hold | what does not hold or apply, and why |"]
        return "\n".join([*head, "|---|---|---|---|---|", *(f"| {' | '.join(r)} |" for r in rows)])


def _tried(one: Case, servers: Any) -> str:
    if one.check is None:
        return ""
    try:
        one.check(servers)
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return f"{one.file}: {one.asked}: {said}" if one.holds else ""
    return "" if one.holds else f"{one.file}: {one.asked}: it holds by now"
