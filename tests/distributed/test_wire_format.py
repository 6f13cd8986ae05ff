"""Messages as bytes and back; what is none is refused."""

import json
from contextlib import suppress
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfer.distributed.wire_format import (
    HEAD,
    FrameError,
    ResultRef,
    deserialize,
    parse_header,
    serialize,
)


def back(message: Any) -> Any:
    """What the other end gets."""
    content = serialize(message)
    text, data = parse_header(content[:HEAD])
    assert len(content) == HEAD + text + data
    return deserialize(content[HEAD : HEAD + text], memoryview(content)[HEAD + text :])


def test_all_that_is_sent() -> None:
    message = {
        "call": 3,
        "given": [np.arange(6, dtype=np.int32).reshape(2, 3), np.bool_(True), None, 1.5, "é"],
        "tables": {"full": np.zeros((0, 4), np.int32), "slid": np.ones(3, np.uint32)},
        "ref": ResultRef(2, "logits"),
        "vectors": jnp.arange(4, dtype=jnp.bfloat16),
    }
    found = back(message)
    assert found["given"][0].dtype == np.int32
    assert found["given"][1].shape == ()
    assert found["vectors"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["given"][0], message["given"][0])  # type: ignore[index]
    assert found["tables"]["full"].shape == (0, 4)
    assert found["ref"] == ResultRef(2, "logits")
    assert (found["call"], found["given"][2:]) == (3, [None, 1.5, "é"])


def test_what_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match="an array of str96 cannot be sent"):
        serialize(np.array("abc"))
    with pytest.raises(TypeError, match="object cannot be sent"):
        serialize({"what": object()})


@pytest.mark.parametrize(
    "text",
    [
        b'{"array": ["float32", 5]}',
        b'{"array": ["object", 1]}',
        b'{"array": ["float32", -1]}',
        b'{"array": ["nothing", 1]}',
        b'{"array": []}',
        b'{"array": ["f4,(2", 1]}',
        b'{"array": ["(,)", 1]}',
        b'{"array": [["float32"], 1]}',
        b'{"array": ["float32", 0, 100000000000000000000000000000]}',
        b'{"dict": [[["a"], 1]]}',
        b'{"dict": [["a"]]}',
        b'{"dict": {"a": 1}}',
        b'{"ref": ["1", 2]}',
        b'{"ref": 1}',
        b'{"other": 1}',
        b'{"a": 1, "b": 2}',
        b"[" * 100_000,
        b"\xff",
        b"",
    ],
)
def test_what_is_none(text: bytes) -> None:
    with pytest.raises(FrameError):
        deserialize(text, memoryview(b"0123"))


@given(st.binary(max_size=200), st.binary(max_size=64))
def test_anything(text: bytes, data: bytes) -> None:
    """Is a message or refused, whatever it is."""
    with suppress(FrameError):
        deserialize(text, memoryview(data))


_WORDS = st.sampled_from(["array", "dict", "ref", "float32", "bool", "f4,(2", "(,)", "O", "a"])
_PARTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_WORDS, inner, max_size=2),
    max_leaves=12,
)


@given(_PARTS)
def test_any_json(parts: Any) -> None:
    """The same of what has the form of messages."""
    with suppress(FrameError):
        deserialize(json.dumps(parts).encode(), memoryview(bytes(64)))


def test_lengths_are_bounded() -> None:
    with pytest.raises(FrameError):
        parse_header(b"\xff" * HEAD)
