"""What formulas add to the residual stream: names, and that nothing else changes the stream."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from jinfer.modelspec.eagle_head import add_taps
from jinfer.modelspec.formula import Formula
from jinfer.modelspec.residual_contributions import Contribution

from .cases import cases, golden
from .helpers import resolved_family

# How many arguments pass; other modules are no part of the stream.
PASSING = {"norm": 1, "post": 1, "bias": 1, "act": 1, "join2": 2, "write": 1, "factor": 1}


def formula(text: str, **numbers: float) -> Formula:
    return Formula(text, (), tuple(numbers.items()), passing=tuple(PASSING.items()))


@dataclass
class Recorder:
    """Taps that record contributions, and edit all of them."""

    edit: Callable[[Any], Any] = lambda value: value
    seen: dict[str, Any] = field(default_factory=dict)

    def assigned(self, name: str, value: Any) -> Any:
        if ".added" not in name:
            return value
        assert name not in self.seen
        self.seen[name] = value
        return self.edit(value)

    def called(self, name: str, module: Callable[[list[Any]], Any], arguments: list[Any]) -> Any:
        return module(arguments)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("x = x + c * attn(norm(x))\nx = x + ffn(norm(x)) / 2", "attn ffn"),
        ("x + attn(norm(x)) + ffn(x)", "attn ffn"),
        ("attn(norm(x)) + x", "attn"),
        ("a = attn(x)\na = post(a)\nx = x + c * a", "attn"),
        ("h = x + attn(norm(x))\nh + ffn(norm(h))", "attn ffn"),  # under another name
        ("x = norm(x + attn(x))\nx = norm(x + ffn(x))", "attn ffn"),
        ("x = norm(x)\nx = c * x + attn(x)", "attn"),
        ("n = norm(x)\nx = n * c + attn(n) * 2", "attn"),
        ("a = post(attn(x))\nx = a / sqrt(2) + x * sqrt(c)", "attn"),
        ("y = shared(x)\ny = y + ffn(x)\nx = x + c * y", "shared+ffn"),
        ("x = x + post(ffn(x) + shared(x))", "ffn+shared"),
        ("x = x + ffn(x) + act(gate(x)) * shared(x)", "ffn shared"),
        ("x = x + shared(x) * act(gate(x))", "shared"),
        ("x = x + bias(ffn(x))\nx = factor(x)", "ffn"),
        ("x = x + ffn(norm(x))\nx = x + ffn(norm(x))\nx = x + ffn(x)", "ffn@1 ffn@2 ffn"),
        ("x = x + write(attn(x), act(w(x)) + c)", "attn"),
        ("x = join2(x[:2], x[2:] + ffn(x))", "ffn"),
        ("x = x + attn(x)\nx = replaced(x)\nx = x + ffn(x)", "ffn"),  # another stream
        ("d = norm(x) - shift(x)\nx = x + ffn(shift(x) + mix(d))", "ffn"),
        ("n = norm(x + other(x))\nx = x + ffn(n)", "ffn"),  # what the stream never sees
        ("x = x + earlier", "earlier"),
        ("x = x + act(x) * x", "x"),
        ("x = x + c", ""),
        ("x = x - ffn(x)", "ffn"),
        ("ffn(x)", ""),
    ],
)
def test_names(text: str, names: str) -> None:
    found = [one.name for one in formula(text, c=0.5).contributions]
    wanted = [name.partition("@") for name in names.split()]
    assert found == [f"{name}.added{at}{number}" for name, at, number in wanted]


def test_what_a_contribution_is_made_of() -> None:
    text = "x = x + c * attn(norm(x))\nx = x + post(act(gate(x)) * ffn(x) + shared(x))"
    assert formula(text, c=0.5).contributions == (
        Contribution("attn.added", ("attn",), ()),
        Contribution("ffn+shared.added", ("ffn", "shared"), ("post",)),
    )


def test_what_is_subtracted_is_added_with_the_other_sign() -> None:
    taps = Recorder()
    value, _ = formula("x - ffn(x)").run({"x": np.float32(1)}, lambda *_: np.float32(3), taps)
    assert (value, taps.seen) == (-2, {"ffn.added": -3})


def test_stems_and_heads_have_none() -> None:
    assert Formula("x = x + ffn(x)", ("ffn",), ()).contributions == ()


@pytest.mark.parametrize("name", ["llama2", "minicpm", "falcon7b"])
def test_a_draft_heads_tap_hides_none(name: str) -> None:
    """A layer that saves its output for a draft head has the same contributions."""
    spec = resolved_family(golden(name).family, golden(name).facts)
    (stack,), (other,) = spec.stacks, add_taps(spec, [0]).stacks
    assert stack.layers[0] != other.layers[0]
    before, after = (one.layers[0].wiring.contributions for one in (stack, other))
    assert [one.name for one in before] == ["attn.added", "ffn.added"]
    assert before == after


def evaluated(wiring: Formula, x: Any, seed: int, taps: Recorder) -> Any:
    """A layer's value with modules that compute anything, another thing for each seed."""
    passing, fixed = dict(wiring.passing or ()), np.arange(4, dtype=np.float32)

    def call(name: str, given: list[Any]) -> Any:
        if name in passing:
            return np.float32(0.5) * given[0] + fixed
        return np.random.default_rng([seed, *name.encode()]).standard_normal(4, np.float32)

    inputs = {**dict.fromkeys(wiring.takes, fixed), "x": x, "tokens": None, "encoded": None}
    return wiring.run(inputs, call, taps)[0]


# Their streams are normed or scaled on the way.
CHANGED = {"gemma4", "minimax", "eagle3"}


def test_a_stream_is_changed_by_contributions_alone() -> None:
    """In the layers of all families: without contributions modules do not matter.

    Where the stream is a sum it stays as it was without them, and is their sum with them, to the
    bit in the order of the formula.
    """
    resolved = {case.family: case.facts for case in cases()}
    del resolved["gemma3n"]  # has parts of x, and mixes them by what modules compute
    wirings = dict[str, tuple[str, Formula]]()
    for family, facts in resolved.items():
        for stack in resolved_family(family, facts).stacks:
            for layer in stack.layers:
                wirings.setdefault(layer.wiring.text, (family, layer.wiring))
    assert len(wirings) > 40
    x = np.random.default_rng(0).standard_normal(4, np.float32)
    for family, wiring in wirings.values():
        taps = Recorder()
        after = evaluated(wiring, x, 0, taps)
        stream = evaluated(wiring, x, 0, Recorder(np.zeros_like))
        assert taps.seen, wiring.text
        assert list(taps.seen) == [one.name for one in wiring.contributions]
        again = evaluated(wiring, x, 1, Recorder(np.zeros_like))
        np.testing.assert_array_equal(stream, again, err_msg=wiring.text)
        if family not in CHANGED and "norm(x +" not in wiring.text:
            np.testing.assert_array_equal(stream, x, err_msg=wiring.text)
            total = sum(taps.seen.values(), start=x)
            np.testing.assert_array_equal(total, after, err_msg=wiring.text)
