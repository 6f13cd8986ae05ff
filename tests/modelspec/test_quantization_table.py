"""Names of quantization methods: earlier words are translated, with a line in the log."""

import logging
from typing import Any

import pytest

from jinfer.modelspec.quantization_table import read_quantization
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_values import SpecValues

VALUES = SpecValues("x.toml", {}, dict[str, Any]().__getitem__, lambda _: False)


@pytest.mark.parametrize(
    ("old", "new"), [("nearest", "rtn"), ("search", "mse"), ("feedback", "gptq")]
)
def test_earlier_method_name_is_translated(
    old: str, new: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "jinfer"):
        assert read_quantization({"method": old}, VALUES).method == new
    (record,) = caplog.records
    assert record.getMessage() == f'quantization.method: "{old}" is now called "{new}"'


def test_current_method_name_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "jinfer"):
        assert read_quantization({"method": "mse"}, VALUES).method == "mse"
    assert not caplog.records


def test_unknown_method_is_an_error() -> None:
    with pytest.raises(SpecError, match=r"quantization\.method"):
        read_quantization({"method": "best"}, VALUES)
