"""Keys: which headers have one that is known."""

import pytest

from jinfer.server.auth import check
from jinfer.server.http_errors import ApiError


def test_each_of_several_keys_is_enough() -> None:
    keys = ("first", "second", "third")
    for key in keys:
        check(keys, f"Bearer {key}", "")
        check(keys, "", key)
    with pytest.raises(ApiError):
        check(keys, "Bearer fourth", "")


def test_without_keys_everybody_may_ask() -> None:
    check((), "", "")
    check((), "Bearer any", "")
