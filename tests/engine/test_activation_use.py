"""Edits as tables of vectors: compositions, ranges and shapes, against their definition."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer import Edit, RequestError, Steer
from jinfer.engine.activation_use import ActivationUse, place_edits
from jinfer.engine.runner.edit_tables import edit_tables, taps_of
from jinfer.nn.row_edits import EDITS, EditTable, row_edit

RNG = np.random.default_rng(3)
PROMPT, TOKENS, HEADS, SIZE = 5, 9, 3, 4
ANY: Any = Edit, Steer  # called with what they refuse
NAME, SHAPES = "decoder.0.attn.heads", {"decoder.0.attn.heads": (HEADS, SIZE)}
WIDTH = HEADS * SIZE


def vector(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape or (WIDTH,)).astype(np.float32)


def table_of(rows: int, *uses: tuple[int, ActivationUse]) -> EditTable:
    """The table of the place, of the uses of some rows."""
    taps = taps_of(use for _, use in uses)
    assert taps is not None
    table: EditTable = edit_tables(taps, rows, uses)[EDITS][NAME]
    return jax.tree.map(jnp.asarray, table)


def by_definition(edits: list[Edit], values: np.ndarray) -> np.ndarray:
    """One edit after the other, token by token."""
    values = values.reshape(TOKENS, WIDTH).copy()
    ends: dict[Any, slice] = {
        "all": slice(None),
        "prompt": slice(PROMPT),
        "answer": slice(PROMPT, None),
    }
    for edit in edits:
        given = edit.tokens
        rows = range(TOKENS)[ends[given] if isinstance(given, str) else given]
        if isinstance(given, slice) and given.start < 0:
            rows = range(PROMPT + given.start, given.stop)
        at = slice(None) if edit.head is None else slice(edit.head * SIZE, (edit.head + 1) * SIZE)
        for number, row in enumerate(rows):
            value = edit.value
            if value.ndim > 1 and len(value) == len(rows):
                value = value[number]
            value, old = value.reshape(-1), values[row, at].astype(np.float64)
            match edit.operation:
                case "add":
                    new = old + value
                case "set":
                    new = np.broadcast_to(value, old.shape)
                case "scale":
                    new = old * value
                case _:
                    unit = value / np.linalg.norm(value)
                    new = old - (old @ unit) * unit
            values[row, at] = new
    return values.reshape(TOKENS, HEADS, SIZE)


CASES: dict[str, list[Edit]] = {
    "add": [Edit(NAME, "add", vector())],
    "steered answer": [Steer(NAME, vector(), 2.5, "answer").edit],
    "ablated head": [Edit(NAME, "set", 0, head=1)],
    "patched": [Edit(NAME, "set", vector(3, HEADS, SIZE), tokens=slice(2, 5))],
    "patched prompt": [Edit(NAME, "set", vector(PROMPT, WIDTH), tokens="prompt")],
    "one head patched": [Edit(NAME, "set", vector(2, SIZE), slice(1, 3), head=2)],
    "projected": [Edit(NAME, "project_out", vector(), tokens="prompt")],
    "projected in a head": [Edit(NAME, "project_out", vector(SIZE), head=0)],
    "from the prompt's end": [Edit(NAME, "scale", -2, tokens=slice(-2, 7))],
    "several": [
        Edit(NAME, "scale", 0.5, tokens="prompt"),
        Edit(NAME, "add", vector(4, WIDTH), tokens=slice(3, 7)),
        Edit(NAME, "project_out", vector(), tokens=slice(4, 6)),
        Edit(NAME, "scale", vector(), tokens="answer"),
        Edit(NAME, "set", vector(SIZE), tokens=slice(1, 6), head=1),
        Edit(NAME, "add", 1.0, tokens="all"),
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_definition(case: str) -> None:
    use = ActivationUse.of((), place_edits(CASES[case], SHAPES, PROMPT))
    other = ActivationUse.of((), place_edits([Edit(NAME, "add", 7)], SHAPES, PROMPT))
    taps = taps_of([other, use, None])
    assert taps is not None
    (place,) = taps.places
    assert (place.form == "add") == all(edit.operation == "add" for edit in CASES[case])
    table = table_of(4, (0, other), (2, use))
    values = vector(3 * TOKENS, HEADS, SIZE)
    rows = np.repeat([2, 1, -1], TOKENS).astype(np.int32)
    at = np.tile(np.arange(TOKENS, dtype=np.int32), 3)
    edit = row_edit(table, jnp.asarray(rows), jnp.asarray(at))
    for shape in ((1, -1, HEADS, SIZE), (-1, WIDTH)):
        found = np.asarray(edit.applied(jnp.asarray(values.reshape(shape))))
        found = found.reshape(values.shape)
        expected = by_definition(CASES[case], values[:TOKENS])
        np.testing.assert_allclose(found[:TOKENS], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found[TOKENS:], values[TOKENS:])


@pytest.mark.parametrize("edit", [Edit(NAME, "add", 1), Edit(NAME, "scale", 2)])
def test_other_rows_keep_their_bits(edit: Edit) -> None:
    """Zeros their signs, and what is not a number or not finite."""
    use = ActivationUse.of((), place_edits([edit], SHAPES, PROMPT))
    table = table_of(1, (0, use))
    odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -1e-30], np.float32)
    values = np.tile(odd, (2, HEADS * SIZE // len(odd)))
    edited = row_edit(table, jnp.array([-1, 0]), jnp.array([0, 0])).applied(jnp.asarray(values))
    assert np.asarray(edited)[0].tobytes() == values[0].tobytes()
    assert np.asarray(edited)[1].tobytes() != values[1].tobytes()


def test_what_is_set_replaces_what_is_not_finite() -> None:
    use = ActivationUse.of((), place_edits([Edit(NAME, "set", 0)], SHAPES, PROMPT))
    table = table_of(1, (0, use))
    values = jnp.full((1, WIDTH), jnp.inf)
    assert not np.any(row_edit(table, jnp.array([0]), jnp.array([0])).applied(values))


def test_the_digest_is_of_what_is_done() -> None:
    def digest(prompt: int, *edits: Edit) -> bytes:
        return ActivationUse.of(("x",), place_edits(edits, SHAPES, prompt)).digest

    one = vector()
    alike = digest(5, Edit(NAME, "add", one))
    assert alike == digest(7, Edit(NAME, "add", one.tolist()))
    assert digest(5) == b""
    others = [
        digest(5, Edit(NAME, "add", 2 * one)),
        digest(5, Edit(NAME, "set", one)),
        digest(5, Edit(NAME, "add", one, tokens="prompt")),
        digest(6, Edit(NAME, "add", one, tokens="prompt")),
    ]
    assert len({alike, *others}) == 5


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (Edit(NAME, "add", vector(11)), r"has shape \[11\]; a token's is \[3, 4\] or one number$"),
        (Edit(NAME, "add", vector(3), head=1), r"\[3\]; a token's is \[4\] or one number$"),
        (Edit(NAME, "project_out", 1), r"has shape \[\]; a token's is \[3, 4\]$"),
        (Edit(NAME, "set", 0, head=3), "has 3 heads; there is no 3$"),
        (
            Edit(NAME, "set", vector(4, 3, 4), tokens="prompt"),
            r"or \[5, 3, 4\] for the 5 tokens of the range$",
        ),
        (
            Edit(NAME, "set", vector(6, 3, 4)),
            r"vectors of 6 tokens, .*; give .*, or tokens=slice\(0, 6\)$",
        ),
    ],
)
def test_wrong_shapes(edit: Edit, said: str) -> None:
    with pytest.raises(RequestError, match=f"^edits: {NAME}.*{said}"):
        place_edits([edit], SHAPES, PROMPT)


def test_one_direction_at_a_time() -> None:
    twice = [Edit(NAME, "project_out", vector()), Edit(NAME, "project_out", vector())]
    with pytest.raises(RequestError, match="two directions are projected out of one token"):
        place_edits(twice, SHAPES, PROMPT)
    with pytest.raises(RequestError, match=r"decoder.0.x has no heads; leave out head"):
        place_edits([Edit("decoder.0.x", "set", 0, head=0)], {"decoder.0.x": (4,)}, PROMPT)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Edit("", "add", 1), "edits: a name is ''"),
        (
            lambda: ANY[0]("x", "mul", 1),
            "edits: x: the operation is 'mul'; it is one of 'add', 'set'",
        ),
        (lambda: Edit("x", "set"), "edits: x: the value is not there; give a finite number"),
        (lambda: Edit("x", "set", [1, [2]]), "edits: x: the value is .*; give a finite number"),
        (lambda: Edit("x", "set", np.nan), "edits: x: the value is nan; give a finite number"),
        (lambda: ANY[0]("x", "set", 0, "some"), "edits: x: tokens is 'some'; give 'all', 'prompt'"),
        (lambda: Edit("x", "set", 0, slice(0, 9, 2)), "edits: x: tokens is slice"),
        (lambda: Edit("x", "set", 0, head=-1), "edits: x: head is -1; give its number"),
        (lambda: Edit("x", "project_out", [0, 0]), "edits: x: project_out needs a direction"),
        (lambda: ANY[1]("x", [1], "2"), "steer: x: the scale is '2'; give a number"),
        (lambda: ANY[1](3, [1]), "steer: a name is 3; give that of a value"),
    ],
)
def test_what_is_no_edit(make: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)
