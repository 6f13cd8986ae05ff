"""API keys: headers that are accepted."""

import pytest

from jinfer.server.http.http_errors import ApiError
from jinfer.server.http.middleware import check_api_key


def test_each_of_several_keys_is_enough() -> None:
    keys = ("first", "second", "third")
    for key in keys:
        check_api_key(keys, f"Bearer {key}", "")
        check_api_key(keys, "", key)
        check_api_key(keys, "Bearer of-another-service", key)
    with pytest.raises(ApiError):
        check_api_key(keys, "Bearer fourth", "")


def test_without_keys_everybody_may_ask() -> None:
    check_api_key((), "", "")
    check_api_key((), "Bearer any", "")
