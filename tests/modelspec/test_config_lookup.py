"""Keys of a config.json are found in every form that files have, and noted as they are read."""

from typing import Any

import pytest

from jinfer.modelspec.config_lookup import lookup_in
from jinfer.modelspec.spec_values import MissingKey

TABLE = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 5.0, "partial_rotary_factor": 0.5}
KINDS = {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_type": "linear"}}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"rope_theta": 5.0, "rope_scaling": TABLE}, TABLE),
        ({"rope_parameters": TABLE, "rope_theta": 9.0, "partial_rotary_factor": 0.1}, TABLE),
        ({"rope_scaling": None, "rope_parameters": TABLE}, TABLE),
        ({"rope_scaling": {}, "rope_parameters": TABLE}, TABLE),
        ({"rope_scaling": TABLE, "rope_parameters": {"rope_theta": 1.0, "factor": 8.0}}, TABLE),
        ({"rope_theta": 5.0, "partial_rotary_factor": 0.5}, None),
        ({"rope_theta": 5.0, "partial_rotary_factor": 0.5, "rope_parameters": KINDS}, None),
    ],
)
def test_rotary_keys_of_every_release(config: dict[str, Any], found: dict[str, Any] | None) -> None:
    lookup = lookup_in(config)
    assert lookup("rope_theta") == 5.0
    assert lookup("partial_rotary_factor") == 0.5
    if found is None:
        with pytest.raises(MissingKey):
            lookup("rope_scaling")
        return
    assert dict(lookup("rope_scaling")) == found
    assert lookup("rope_scaling.factor") == 2.0


def test_empty_tables_count_as_absent() -> None:
    lookup = lookup_in({"rope_scaling": {}, "rope_parameters": {}, "inner": {"empty": {}}})
    for key in ("rope_scaling", "rope_parameters", "rope_theta", "inner.empty"):
        with pytest.raises(MissingKey):
            lookup(key)


def test_reading_a_table_is_not_reading_what_is_in_it() -> None:
    asked = set[str]()
    lookup = lookup_in({"rope_parameters": TABLE | {"inner": {"a": 1, "b": 2}}, "c": 3}, asked)
    table = lookup("rope_parameters")
    assert "factor" in table
    assert len(table) == 5
    assert asked == set()
    assert table["inner"]["a"] + lookup("c") == 4
    assert lookup("rope_theta") == 5.0
    assert asked == {"rope_parameters.inner.a", "rope_parameters.rope_theta", "c"}


def test_a_number_in_a_key_is_an_index_of_a_list() -> None:
    lookup = lookup_in({"top_k": [8, 6], "layers": [{"width": 3}], "count": 5})
    assert (lookup("top_k.1"), lookup("layers.0.width")) == (6, 3)
    for key in ("top_k.2", "layers.1.width", "count.0", "top_k.last"):
        with pytest.raises(MissingKey, match=key):
            lookup(key)
