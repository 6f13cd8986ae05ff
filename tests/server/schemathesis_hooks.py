"""What schemathesis generates but cannot send, left out."""

from typing import Any

import schemathesis


@schemathesis.hook
def filter_case(context: schemathesis.HookContext, case: schemathesis.Case) -> bool:
    """Leaves out forms with an empty list: it is sent as a field that is not there."""
    form: Any = case.body if case.media_type == "multipart/form-data" else None
    return not isinstance(form, dict) or not any(value == [] for value in form.values())
