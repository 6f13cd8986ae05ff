"""Help texts of sampling parameters, parsed from the docstring of `SamplingParams`."""

from __future__ import annotations

import inspect
import re

from jinfer.sampling.sampling_params import SamplingParams


def described() -> dict[tuple[str, ...], str]:
    """Names of parameters that are described together -> what they do."""
    attributes = inspect.getdoc(SamplingParams) or ""
    attributes = attributes.partition("Attributes:\n")[2].partition("\n\n")[0]
    texts: dict[tuple[str, ...], str] = {}
    for entry in re.split(r"\n(?=    \S)", attributes):
        names, _, text = " ".join(entry.split()).partition(": ")
        texts[tuple(names.split(", "))] = text
    return texts
