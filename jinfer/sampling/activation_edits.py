"""Activation edits (interventions, steering vectors): a request's changes of named values.

NumPy is imported in functions: the command line reads the table of parameters too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from jinfer.modelspec.spec_errors import show_value
from jinfer.sampling.request_errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float

Operation = Literal["add", "set", "scale", "project_out"]
Range = Literal["all", "prompt", "answer"]

OPEN = 2**31 - 1  # a position beyond all tokens: the end of an open range
UNSEEN = -1e30  # a score whose softmax is 0


@dataclass(frozen=True, eq=False)
class Edit:
    """A change of one named value of the model, at some tokens.

    Attributes:
        name: the value's name, as `LLM.names` lists it: "decoder.3.x" is the residual stream after
            layer 3, "decoder.3.attn.heads" the attention's heads before they are joined.
        operation: "add" adds the value; "set" replaces the activation by it, 0 ablates; "scale"
            multiplies by it; "project_out" removes its direction.
        value: a number, a vector, or a vector for each token of the range [tokens, ...], as a
            trace has them (activation patching); a head's vector where `head` is given.
        tokens: "all", "prompt" or "answer", or a slice of positions in prompt and answer together,
            of which negative ones count from the prompt's end.
        head: only this head of a value that has heads.

    Raises:
        RequestError: an attribute is invalid.
    """

    name: str
    operation: Operation
    value: Any = None
    tokens: Range | slice = "all"
    head: int | None = None

    field: ClassVar[str] = "edits"  # the field that errors name

    def __post_init__(self) -> None:
        _check_name(self.name, self.field)
        if self.operation not in get_args(Operation):
            listed = ", ".join(map(repr, get_args(Operation)))
            raise RequestError(
                f"edits: {self.name}: the operation is {show_value(self.operation)}; "
                f"it is one of {listed}"
            )
        head = self.head if self.head is None else _whole(self.head)
        if self.head is not None and (head is None or head < 0):
            raise RequestError(
                f"edits: {self.name}: head is {show_value(self.head)}; give its number, from 0"
            )
        object.__setattr__(self, "head", head)
        object.__setattr__(self, "tokens", _range(self.tokens, self.name, self.field))
        object.__setattr__(self, "value", _values(self.value, self.name, self.field))
        if self.operation == "project_out" and not self.value.any():
            raise RequestError(f"edits: {self.name}: project_out needs a direction, not zeros")


class _SteeringEdit(Edit):
    field = "steer"


@dataclass(frozen=True, eq=False)
class Steer:
    """A steering vector: `scale` times it is added to one named value of the model.

    Attributes:
        name: the value's name: "decoder.12.x" is the residual stream after layer 12.
        vector: the direction that is added, as wide as the value.
        scale: factor of the vector.
        tokens: the tokens, as in `Edit`.

    Raises:
        RequestError: an attribute is invalid.
    """

    name: str
    vector: Any
    scale: float = 1.0
    tokens: Range | slice = "all"

    def __post_init__(self) -> None:
        import numpy as np

        _check_name(self.name, "steer")
        scale = np.asarray(self.scale)
        if scale.ndim or scale.dtype.kind not in "iuf" or not np.isfinite(scale):
            raise RequestError(
                f"steer: {self.name}: the scale is {show_value(self.scale)}; give a number"
            )
        object.__setattr__(self, "scale", float(scale))
        object.__setattr__(self, "tokens", _range(self.tokens, self.name, "steer"))
        object.__setattr__(self, "vector", _values(self.vector, self.name, "steer"))
        if not np.isfinite(self.edit_values).all():
            raise RequestError(
                f"steer: {self.name}: scale {self.scale:g} times the vector is more than float32 "
                "holds; give smaller ones"
            )

    @property
    def edit(self) -> Edit:
        """Converts the vector to an edit."""
        return _SteeringEdit(self.name, "add", self.edit_values, self.tokens)

    @property
    def edit_values(self) -> Float[np.ndarray, ...]:
        """The vector times its scale."""
        import numpy as np

        with np.errstate(over="ignore", invalid="ignore"):  # an error reports it
            return np.asarray(np.float32(self.scale) * self.vector)


def token_range(tokens: Range | slice, prompt: int) -> tuple[int, int]:
    """Returns a range's first position and the position after its last; `OPEN`: no end.

    Args:
        prompt: number of tokens of the prompt.
    """
    if tokens == "all":
        return 0, OPEN
    if tokens == "prompt":
        return 0, prompt
    if tokens == "answer":
        return prompt, OPEN
    assert isinstance(tokens, slice), "it was checked"
    begin, end = (
        at if at is None or at >= 0 else max(0, prompt + at) for at in (tokens.start, tokens.stop)
    )
    return begin or 0, OPEN if end is None else min(end, OPEN)


def _check_name(name: object, field: str) -> None:
    if not isinstance(name, str) or not name:
        raise RequestError(
            f"{field}: a name is {show_value(name)}; give that of a value, such as 'decoder.3.x'"
        )


def _whole(number: object) -> int | None:
    """Reads a whole number of Python or NumPy; None: it is another value."""
    import numpy as np

    right = isinstance(number, int | np.integer) and not isinstance(number, bool)
    return int(number) if right else None  # type: ignore[call-overload]


def _range(tokens: object, name: str, field: str) -> Range | slice:
    """A range of tokens, a slice with Python's numbers."""
    if isinstance(tokens, str) and tokens in get_args(Range):
        return tokens  # type: ignore[return-value]
    if isinstance(tokens, slice) and tokens.step in (None, 1):
        ends = [at if at is None else _whole(at) for at in (tokens.start, tokens.stop)]
        span = (tokens.start, tokens.stop)
        known = [e is None or abs(e) < OPEN for e in ends]
        if all(known) and ends.count(None) == span.count(None):
            return slice(*ends)
    raise RequestError(
        f"{field}: {name}: tokens is {show_value(tokens)}; give 'all', 'prompt', 'answer' or "
        "a slice of positions, with a step of 1"
    )


def _values(value: Any, name: str, field: str) -> Float[np.ndarray, ...]:
    """Converts numbers to a read-only float32 array."""
    import numpy as np

    try:
        raw = np.array(value)
        if raw.dtype.kind in "cSU":  # complex numbers and texts would be cast silently
            raise TypeError(raw.dtype)
        with np.errstate(over="ignore"):
            values = raw.astype(np.float32)
    except (TypeError, ValueError):
        values = np.array(np.nan)
    if name.endswith(".scores"):  # scores of masked keys
        values = np.where(np.isneginf(values), np.float32(UNSEEN), values)
    if value is None or not np.isfinite(values).all():
        shown = "not there" if value is None else show_value(value)
        raise RequestError(
            f"{field}: {name}: the value is {shown}; give a finite number or an array of them"
        )
    values.setflags(write=False)
    return values
