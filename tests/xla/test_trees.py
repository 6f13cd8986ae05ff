"""Trees without JAX, against JAX's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jinfer.modelspec.quant_format import FORMATS
from jinfer.quant.quantized_tensor import abstract
from jinfer.xla import trees
from jinfer.xla.abstract import Abstract
from tests.xla.processes import needs_known, run


class Pair(NamedTuple):
    left: Any
    right: Any


@trees.register
@dataclass(frozen=True)
class Record:
    values: Any
    name: str = field(metadata={"static": True})


TREES: list[Any] = [
    3,
    None,
    (),
    {"b": 1, "a": (2, None, [3, Pair(4, {"c": 5})])},
    Record({"x": 1, "y": Pair(2, 3)}, "one"),
    abstract((2, 64, 96), FORMATS["q3.5"]),
]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_as_jax_takes_them_apart(tree: Any) -> None:
    leaves, structure = trees.flatten(tree)
    assert leaves == jax.tree.leaves(tree) == trees.leaves(tree)
    other = trees.unflatten(structure, list(range(len(leaves))))
    assert other == jax.tree.unflatten(jax.tree.structure(tree), list(range(len(leaves))))
    assert structure == trees.structure_of(other)
    paths = jax.tree_util.tree_leaves_with_path(tree)
    assert trees.named_leaves(tree) == [(jax.tree_util.keystr(path), leaf) for path, leaf in paths]


def test_map() -> None:
    one, two = Record([1, 2], "a"), Record([10, 20], "a")
    assert trees.map(lambda a, b: a + b, one, two) == Record([11, 22], "a")
    with pytest.raises(ValueError, match="Mismatch"):
        trees.map(lambda a, b: a + b, one, Record([10, 20], "b"))
    assert trees.leaves([one, 3], is_leaf=lambda part: isinstance(part, Record)) == [one, 3]


@needs_known
def test_records_of_before_are_trees_of_jax_too() -> None:
    script = """
from jinfer.xla.later import postpone
assert postpone()
from jinfer.modelspec.quant_format import FORMATS
from jinfer.quant.quantized_tensor import abstract
from jinfer.xla import trees
tree = abstract((64, 96), FORMATS["q4"])
before = trees.leaves(tree)
import jax
print(jax.tree.leaves(tree) == before == trees.leaves(tree), len(before))
"""
    assert run(script) == "True 2"


def test_abstract_arrays() -> None:
    one = Abstract([2, 3], "float16")
    assert (one.shape, one.dtype, one.ndim, one.size, one.nbytes) == ((2, 3), np.float16, 2, 6, 12)
    assert one == Abstract((2, 3), np.float16) != Abstract((2, 3), np.float32)
    assert len({one, Abstract((2, 3), np.float16), Abstract((3, 2), np.float16)}) == 2
    assert repr(one) == "Abstract((2, 3), float16)"
    out = jax.eval_shape(lambda x: x.sum(axis=0), one)
    assert (out.shape, out.dtype) == ((3,), np.float16)
    lowered = jax.jit(lambda x: 2 * x).lower(one)
    assert lowered.out_info.shape == (2, 3)
