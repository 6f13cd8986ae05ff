"""`dataclasses.dataclass`, made in a third of the time.

Python's own writes six functions for each frozen class as source text and compiles them, a
millisecond or two; a start makes more than a hundred classes. Here only `__init__` is written, and
the other functions are the same for all classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import field as field
from dataclasses import replace as replace
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # To a type checker it is Python's own.
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        cls: type | None = None,
        *,
        frozen: bool = False,
        eq: bool = True,
        repr: bool = True,
        kw_only: bool = False,
    ) -> Any:
        """As `dataclasses.dataclass`, which says what the arguments do.

        Other than there, `dataclasses.dataclass` itself may not make a frozen class of a class that
        this made.
        """

        def made(cls: type) -> type:
            own = set(cls.__dict__)
            # Where there is none, Python's writes the signature here, in a millisecond.
            cls.__doc__ = cls.__doc__ or cls.__name__
            dataclasses.dataclass(cls, eq=False, repr=False, kw_only=kw_only)
            if repr and "__repr__" not in own:
                cls.__repr__ = _repr
            if eq and "__eq__" not in own:
                cls.__eq__ = _eq
                if "__hash__" not in own:
                    cls.__hash__ = _hash if frozen else None
            if frozen:
                cls.__setattr__, cls.__delattr__ = _set_once, _keep
            fields = dataclasses.fields(cls)
            cls._compared = _getter(each.name for each in fields if each.compare)
            cls._shown = tuple(each.name for each in fields if each.repr)
            return cls

        return made if cls is None else made(cls)


def _getter(names: Any) -> Callable[[Any], Any]:
    """What gives a tuple of these attributes."""
    match tuple(names):
        case ():
            return lambda _: ()
        case (name,):
            return lambda record: (getattr(record, name),)
        case names:
            return attrgetter(*names)


@recursive_repr()
def _repr(self: Any) -> str:
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in type(self)._shown)
    return f"{type(self).__qualname__}({shown})"


def _eq(self: Any, other: Any) -> Any:
    if type(other) is not type(self):
        return NotImplemented
    return type(self)._compared(self) == type(self)._compared(other)


def _hash(self: Any) -> int:
    return hash(type(self)._compared(self))


def _set_once(self: Any, name: str, value: Any) -> None:
    # `__init__` sets each field, once.
    if name in self.__dict__ or name not in type(self).__dataclass_fields__:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
    self.__dict__[name] = value


def _keep(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
