"""What $JINFER_NO_KERNELS turns off."""

from __future__ import annotations

import pytest

from jinfer import LLM, USER_ERRORS
from jinfer.ops import disable_kernels
from jinfer.ops.disable_kernels import SwitchError


@pytest.mark.parametrize(
    ("given", "off"),
    [
        ("", set()),
        ("0", set()),
        ("1", {"products", "attention", "experts", "sampling"}),
        ("all", {"products", "attention", "experts", "sampling"}),
        ("attention", {"attention"}),
        ("products, experts", {"products", "experts"}),
    ],
)
def test_disabled_kernels_of_each_setting(
    given: str, off: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JINFER_NO_KERNELS", given)
    assert disable_kernels.disabled_kernels() == off
    assert disable_kernels.kernels_enabled("products") == ("products" not in off)


def test_all_kernels_are_enabled_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JINFER_NO_KERNELS", raising=False)
    assert not disable_kernels.disabled_kernels()


def test_unknown_kernel_name_is_an_early_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JINFER_NO_KERNELS", "products,norms")
    assert SwitchError in USER_ERRORS
    with pytest.raises(SwitchError) as caught:
        LLM("nothing")
    known = "products, attention, experts, sampling"
    assert str(caught.value) == (
        f"JINFER_NO_KERNELS: there are no kernels 'norms'; give 1, all, or some of {known}"
    )
