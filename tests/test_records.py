"""Records are what `dataclasses.dataclass` makes: each rule is held against Python's own."""

# mypy: disable-error-code="call-arg,call-overload,attr-defined,misc,type-var,arg-type"

import copy
import dataclasses
import pickle
from functools import cached_property
from typing import Any

import pytest

from jinfer.records import dataclass as ours

MAKERS = {"python": dataclasses.dataclass, "ours": ours}


@pytest.fixture(params=MAKERS)
def maker(request: pytest.FixtureRequest) -> Any:
    """Both, so that a test says nothing of one that is not so of the other."""
    return MAKERS[request.param]


@ours(frozen=True)
class Kept:
    """Where pickle finds it."""

    a: int
    b: tuple[int, ...] = ()


def test_a_frozen_class(maker: Any) -> None:
    @maker(frozen=True)
    class Point:
        x: int
        y: int = 2
        note: str = dataclasses.field(default="", compare=False)
        hidden: int = dataclasses.field(default=0, repr=False)

        @cached_property
        def far(self) -> int:
            return self.x + self.y

    one, other = Point(1), Point(1, note="other")
    assert one == other
    assert hash(one) == hash(other)
    assert one != Point(2)
    assert one != (1, 2, "", 0)
    assert Point(1, hidden=1) != one
    assert repr(one).endswith("<locals>.Point(x=1, y=2, note='')")
    assert one.far == 3
    assert [field.name for field in dataclasses.fields(Point)] == ["x", "y", "note", "hidden"]
    assert dataclasses.replace(one, y=5) == Point(1, 5)
    assert dataclasses.asdict(one) == {"x": 1, "y": 2, "note": "", "hidden": 0}
    assert Point.__match_args__ == ("x", "y", "note", "hidden")
    for name in ("x", "unknown"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=name):
            setattr(one, name, 3)
    with pytest.raises(dataclasses.FrozenInstanceError, match="x"):
        del one.x
    assert one.x == 1
    with pytest.raises(TypeError):
        Point()


def test_a_class_that_may_change(maker: Any) -> None:
    @maker
    class Count:
        n: int = 0
        of: list[int] = dataclasses.field(default_factory=list)

    one = Count()
    one.n += 1
    one.of.append(3)
    assert one == Count(1, [3])
    assert Count().of == []
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


def test_classes_without_equality(maker: Any) -> None:
    @maker(eq=False, frozen=True)
    class Handle:
        n: int

    one = Handle(1)
    assert one == one
    assert one != Handle(1)
    assert hash(one) != hash(Handle(1))


def test_own_methods_stay(maker: Any) -> None:
    @maker(frozen=True)
    class Own:
        n: int

        def __repr__(self) -> str:
            return "own"

        def __hash__(self) -> int:
            return 7

    @maker(frozen=True)
    class Near:
        n: int

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 8

    assert repr(Own(1)) == "own"
    assert hash(Own(1)) == 7
    assert Own(1) == Own(1)
    assert Near(1) == Near(2)
    assert hash(Near(1)) == 8


def test_a_class_made_of_another(maker: Any) -> None:
    @maker(frozen=True)
    class Base:
        n: int = 1

    @maker(frozen=True, kw_only=True)
    class More(Base):
        m: int

        def __post_init__(self) -> None:
            object.__setattr__(self, "n", self.n * 10)

    assert (More(m=2).n, More(m=2).m) == (10, 2)
    assert More(m=2) != Base(10)
    assert More(m=2) == More(m=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        More(m=2).m = 3


def test_no_field_at_all(maker: Any) -> None:
    @maker(frozen=True)
    class Nothing:
        pass

    assert Nothing() == Nothing()
    assert len({Nothing(), Nothing()}) == 1
    assert repr(Nothing()).endswith("Nothing()")


def test_a_record_that_holds_itself(maker: Any) -> None:
    @maker
    class Node:
        children: list[Any]

    node = Node([])
    node.children.append(node)
    assert repr(node).endswith("Node(children=[...])")


def test_a_record_can_be_copied_and_sent() -> None:
    one = Kept(1, (2, 3))
    for twin in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert twin == one
        with pytest.raises(dataclasses.FrozenInstanceError):
            twin.a = 2
