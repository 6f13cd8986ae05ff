"""`jinfer inspect SOURCE`: what a checkpoint is, and which tensor is which parameter.

With `--partition DEVICES` it shows each device's shard.

No family has to match: for a checkpoint that none fits, or not quite, it lists extra and missing
tensors, and proposes lines for a specification.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jinfer.cli.inspect.match_checkpoint import (
    CheckpointMatch,
    ProposedLine,
    converted_facts,
    describe,
    propose_lines,
)
from jinfer.cli.propose.checkpoint_layers import NUMBER, is_ignorable, leaf_of, module_name
from jinfer.cli.propose.propose_spec import IRRELEVANT, propose_spec
from jinfer.cli.propose.tensor_roles import roles_of
from jinfer.cli.run_command import SET, SOURCE, command, overrides_of
from jinfer.cli.terminal.argument_parser import argument
from jinfer.html.html_page import rounded, table_html
from jinfer.loader.checkpoint import Tensor
from jinfer.loader.checkpoint.native_checkpoint import NativeCheckpoint
from jinfer.loader.model_files import ModelFiles
from jinfer.loader.weights.model_size import WIDTHS, WIDTHS_NOTE, bytes_text, count_text
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.view.model_svg import distinct_layers, draw_model, numbers_text
from jinfer.parallel.cost_model import HARDWARE

_WIDTH_HEADS = ("bits", "stored", "embeddings", "all else", "together")
_TENSOR_HEADS = ("tensor", "shape", "type")


def facts(found: CheckpointMatch) -> list[tuple[str, str]]:
    """Header lines: (word, value)."""
    opened = found.opened
    lines = [("specification", str(opened.path))] if opened.path != opened.weights else []
    lines += [
        ("path", str(opened.weights)),
        *(
            converted_facts(opened.checkpoint)
            if isinstance(opened.checkpoint, NativeCheckpoint)
            else [("format", opened.checkpoint.format)]
        ),
        ("in the file", f"{len(_stored(found))} tensors, {bytes_text(_stored_bytes(found))}"),
    ]
    if any(opened.architectures):
        lines.append(("calls itself", ", ".join(opened.architectures)))
    lines.append(("family", f"{found.family} ({found.how})" if found.family else "none"))
    if found.spec is None or found.sizes is None:
        return [*lines, ("no specification", found.problem)]
    sizes = found.sizes
    tables = f"{sizes.embeddings:,} in embeddings"
    return [
        *lines,
        ("type", found.spec.type),
        ("dims", ", ".join(f"{name} {rounded(value)}" for name, value in found.spec.dims.items())),
        (
            "parameters",
            f"{count_text(sizes.parameters)}: {tables}, {sizes.matrices + sizes.heads:,} in other "
            f"matrices, {sizes.plain:,} in norms, biases and the like",
        ),
        *([("KV cache", _cache(found))] if sizes.cache_per_token else []),
    ]


def _stored(found: CheckpointMatch) -> Mapping[str, Tensor]:
    """The file's contents: for a native checkpoint its arrays, not the source's tensors."""
    checkpoint = found.opened.checkpoint
    return checkpoint.parts if isinstance(checkpoint, NativeCheckpoint) else checkpoint.tensors


def _stored_bytes(found: CheckpointMatch) -> int:
    return sum(tensor.nbytes for tensor in _stored(found).values())


def _cache(found: CheckpointMatch) -> str:
    assert found.sizes is not None
    assert found.spec is not None
    per_token, context = found.sizes.cache_per_token, found.spec.dims.get("context", 0)
    text = f"at 16 bits {bytes_text(per_token)} a token"
    text += f", {bytes_text(per_token * context)} for a context of {context}" if context else ""
    if cross := found.sizes.cross_per_token:
        text += f"; {bytes_text(cross)} for each token that the encoder reads"
    return text


def memory(found: CheckpointMatch) -> list[tuple[str, ...]]:
    """A row for each width: bits, stored bits per weight, embeddings, all else, total."""
    sizes = found.sizes
    return [
        (
            f"{bits:g}",
            f"{sizes.matrix_bits(bits):.4g}",
            bytes_text(sizes.embedding_bytes(bits)),
            bytes_text(sizes.other_bytes(bits)),
            bytes_text(sizes.total_bytes(bits)),
        )
        for bits in (WIDTHS if sizes else ())
        if sizes
    ]


def tensors(found: CheckpointMatch) -> list[tuple[str, ...]]:
    """The file's tensors, equal layers on one line: name, shape, type, role.

    Without a specification the role is guessed from the name.
    """
    likely = {} if found.spec else roles_of(row.tensor for row in found.rows)
    groups = fold(
        found.rows,
        lambda row: row.tensor.name,
        lambda row: (
            row.tensor.shape,
            row.type,
            row.note,
            frozenset(map(pattern_of, row.parameters)),
        ),
    )
    lines: list[tuple[str, ...]] = []
    for name, rows in groups:
        held = " + ".join(fold_names(p for row in rows for p in row.parameters))
        note = f"({rows[0].note})" if rows[0].note else ""
        if not found.spec:
            held = _likely(likely, rows[0].tensor)
        shape = " x ".join(map(str, rows[0].tensor.shape)) or "one number"
        lines.append((name, shape, rows[0].type, f"{held} {note}".strip()))
    return lines


def _likely(roles: Mapping[str, str], tensor: Tensor) -> str:
    """The parameter that a tensor's name suggests."""
    if is_ignorable(tensor):
        return "none: a buffer"
    role = roles.get(module_name(tensor.name), "")
    return f"{role}.{leaf_of(tensor.name)}".rstrip(".") if role else "?"


def _tensor_heads(found: CheckpointMatch) -> tuple[str, ...]:
    return (*_TENSOR_HEADS, "parameter" if found.spec else "by its name")


def wiring(found: CheckpointMatch) -> Iterator[str]:
    """The formulas of all stacks, as in the specification."""
    for stack in found.spec.stacks if found.spec else ():
        parts = [("stem", stack.stem.text)]
        parts += [(f"layer {numbers_text(n)}", s.wiring.text) for s, n in distinct_layers(stack)]
        for name, text in [*parts, ("head", stack.head.text)]:
            yield f"{stack.name} {name}:"
            yield from (f"    {line.strip()}" for line in text.strip().splitlines())


def missing(found: CheckpointMatch) -> list[str]:
    """Parameters without a tensor, folded, with the names looked for."""
    groups = fold(
        found.missing,
        lambda item: item.parameter,
        lambda item: (item.shape, tuple(map(pattern_of, item.names))),
    )
    lines = []
    for name, group in groups:
        looked = " or ".join(fold_names(n for item in group for n in item.names))
        reason = f"looked for {looked}" if looked else "[tensors] has no name for it"
        lines.append(f"{name} {list(group[0].shape)}: {reason}")
    return lines


def unread(found: CheckpointMatch) -> list[str]:
    """Unused configuration keys, those known to change the computation first."""
    known = found.consequences
    rest = {key: value for key, value in found.unread.items() if key not in known}
    lines = [f"{key} = {_value(value)}  # {how}" for key, (value, how) in known.items()]
    lines += [f"{k} = {_value(v)}" for k, v in rest.items() if not IRRELEVANT.fullmatch(k)]
    plain = [key for key in rest if IRRELEVANT.fullmatch(key)]
    return [*lines, f"of no consequence: {', '.join(plain)}"] if plain else lines


def _unchanging(found: CheckpointMatch) -> dict[str, tuple[Any, str | None]]:
    return {key: (value, None) for key, value in found.unread.items()}


def _value(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def proposals(found: CheckpointMatch) -> list[ProposedLine]:
    """Proposed lines of `[tensors]` for missing parameters."""
    return propose_lines(found.unused, found.missing) if found.spec else []


def to_text(found: CheckpointMatch, proposed: str = "") -> str:
    """Return the whole report; `proposed` is the file with the proposed spec, if any."""
    width = max(len(word) for word, _ in facts(found))
    parts = ["\n".join(f"{word:<{width}}  {value}" for word, value in facts(found))]
    if found.spec:
        parts.append(
            f"Memory ({WIDTHS_NOTE}):\n{_columns(_WIDTH_HEADS, memory(found), right=True)}"
        )
        parts.append("Wiring:\n" + "\n".join(f"  {line}" for line in wiring(found)))
    parts.append(f"Tensors:\n{_columns(_tensor_heads(found), tensors(found))}")
    parts += [
        f"{heading}:\n" + "\n".join(f"  {line}" for line in lines)
        for heading, lines in _problems(found).items()
        if lines
    ]
    if proposed:
        parts.append(f"A proposed specification is in {proposed}.")
    elif found.spec is None:
        text = propose_spec(found.opened)
        parts.append(f"A proposed specification, to save as a .toml:\n\n{text}".rstrip())
    if found.refused:
        named = ", ".join(found.consequences)
        parts.append(f'Refused for {named}; trust_config = "warn" goes on without.')
    if found.fits:
        parts.append("Every parameter has its tensor, and every tensor its place.")
    # Names come from the file: terminal control characters must be removed.
    text = "\n\n".join(parts)
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _problems(found: CheckpointMatch) -> dict[str, list[str]]:
    unplaced = fold_names(tensor.name for tensor in found.unused)
    return {
        "Keys that nothing read": unread(found),
        "Tensors without a place (map them in [tensors], or list them under ignore)": unplaced,
        "Parameters without a tensor": missing(found),
        "Tensors of a wrong shape": list(found.wrong),
        "Likely lines for [tensors]": [f"{line}  # {line.reason}" for line in proposals(found)],
    }


def _columns(heads: Sequence[str], rows: Sequence[Sequence[str]], right: bool = False) -> str:
    """A table as text; all but the last column padded, to the right if they are numbers."""
    widths = [max(len(row[n]) for row in [heads, *rows]) for n in range(len(heads))]
    mark = ">" if right else "<"
    lines = []
    for row in [heads, *rows]:
        cells = [f"{cell:{mark}{width}}" for cell, width in zip(row, widths, strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def to_json(found: CheckpointMatch) -> dict[str, Any]:
    """The whole report as plain values, unfolded."""
    spec, sizes = found.spec, found.sizes
    return {
        "path": str(found.opened.weights),
        "format": found.opened.checkpoint.format,
        "architectures": found.opened.architectures,
        "family": found.family or None,
        "found": found.how or None,
        "problem": found.problem or None,
        "type": spec.type if spec else None,
        "dims": dict(spec.dims) if spec else {},
        "converted": isinstance(found.opened.checkpoint, NativeCheckpoint),
        "bytes_in_file": _stored_bytes(found),
        "parameters": sizes.parameters if sizes else None,
        "cache_bytes_per_token": sizes.cache_per_token if sizes else None,
        "memory": {f"{bits:g}": sizes.total_bytes(bits) for bits in WIDTHS} if sizes else {},
        "wiring": list(wiring(found)),
        "tensors": [
            {
                "name": row.tensor.name,
                "shape": list(row.tensor.shape),
                "type": row.tensor.type,
                "becomes": row.becomes or None,
                "parameters": row.parameters,
                "note": row.note or None,
            }
            for row in found.rows
        ],
        "unread": [
            {"key": key, "value": _value(value), "changes": how}
            for key, (value, how) in (_unchanging(found) | dict(found.consequences)).items()
        ],
        "unused": [tensor.name for tensor in found.unused],
        "missing": [
            {"parameter": m.parameter, "shape": list(m.shape), "looked_for": list(m.names)}
            for m in found.missing
        ],
        "wrong_shape": list(found.wrong),
        "proposed": [str(line) for line in proposals(found)],
        "proposed_spec": None if spec else propose_spec(found.opened),
    }


def to_html(found: CheckpointMatch) -> str:
    """The whole report as an HTML page."""
    parts = [table_html(("", ""), facts(found))]
    if found.spec:
        parts += [draw_model(found.spec), f"<h2>Memory</h2><p>{WIDTHS_NOTE}</p>"]
        parts.append(table_html(_WIDTH_HEADS, memory(found)))
        parts.append(f"<h2>Wiring</h2><pre>{escape(chr(10).join(wiring(found)))}</pre>")
    parts += ["<h2>Tensors</h2>", table_html(_tensor_heads(found), tensors(found))]
    for heading, lines in _problems(found).items():
        if lines:
            parts.append(f"<h2>{escape(heading)}</h2><pre>{escape(chr(10).join(lines))}</pre>")
    if found.spec is None:
        parts.append(
            f"<h2>A proposed specification</h2><pre>{escape(propose_spec(found.opened))}</pre>"
        )
    title = escape(str(found.opened.path.name))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        '<body style="font-family:system-ui,sans-serif;color-scheme:light dark;margin:24px">'
        f"<h1>{title}</h1>{''.join(parts)}</body></html>\n"
    )


def fold[T](
    items: Iterable[T], name: Callable[[T], str], key: Callable[[T], Hashable]
) -> list[tuple[str, list[T]]]:
    """Group items whose names differ only in numbers and whose keys are equal, in order.

    Returns:
        (folded name, items) of each group.
    """
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault((pattern_of(name(item)), key(item)), []).append(item)
    return [(_filled([name(item) for item in group]), group) for group in groups.values()]


def fold_names(names: Iterable[str]) -> list[str]:
    """Fold names that differ only in numbers: `layers.{0..29}.attn.q`."""
    return [name for name, _ in fold(names, lambda name: name, lambda name: None)]


def pattern_of(name: str) -> tuple[str, ...]:
    """Split a name at the numbers that are whole parts of it."""
    return tuple(NUMBER.split(name))


def _filled(names: list[str]) -> str:
    """Names of one pattern as one, with the ranges of their numbers, slot by slot."""
    found = [list(map(int, NUMBER.findall(name))) for name in names]
    slots = [sorted(set(numbers)) for numbers in zip(*found, strict=True)]
    texts = iter(str(s[0]) if len(s) == 1 else f"{{{numbers_text(s)}}}" for s in slots)
    return NUMBER.sub(lambda number: next(texts), names[0])


@command(
    "Prints a checkpoint's format, family, sizes, and each tensor's parameter.",
    SOURCE,
    SET,
    argument(
        "--partition", metavar="DEVICES", help='show the shard of each device: "0&1;2&3", "auto"'
    ),
    argument(
        "--on", choices=sorted(HARDWARE), default="a100", help="hardware of the estimate (a100)"
    ),
    argument("--propose-spec", metavar="FILE", help="write a first specification (.toml)"),
    argument("--draft", metavar="FILE", help=argparse.SUPPRESS),
    argument(
        "--json", metavar="FILE", help="write the report as JSON; - prints it instead of the text"
    ),
    argument("--svg", metavar="FILE", help="write a drawing of the wiring"),
    argument("--html", metavar="FILE", help="write the report with the drawing as a page"),
)
def main(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    overrides = overrides_of(options.set)
    if options.partition:
        return _show_plan(options, overrides)
    found = describe(options.source, overrides)
    if options.svg and found.spec is None:
        raise SpecError(options.source, "--svg", f"nothing to draw: {found.problem}")
    if options.draft:
        print("note: --draft is now called --propose-spec", file=sys.stderr)
    file = options.propose_spec or options.draft
    if file:
        _write_spec(found.opened, options.source, Path(file))
    if options.json == "-":
        print(json.dumps(to_json(found), ensure_ascii=False, indent=1))
    else:
        print(to_text(found, file or ""))
    if options.json and options.json != "-":
        text = json.dumps(to_json(found), ensure_ascii=False, indent=1)
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    if options.svg and found.spec is not None:
        Path(options.svg).write_text(draw_model(found.spec), encoding="utf-8")
    if options.html:
        Path(options.html).write_text(to_html(found), encoding="utf-8")
    return 0


def _show_plan(options: argparse.Namespace, overrides: dict[str, Any]) -> int:
    # Here: it compiles, and imports what compiling needs; a report needs none of it.
    from jinfer.cli.inspect.inspect_partition import to_svg, to_text, view

    plan = view(options.source, overrides, options.partition, options.on)
    print(to_text(plan))
    if options.svg:
        Path(options.svg).write_text(to_svg(plan), encoding="utf-8")
    if plan.memory.problem:
        raise SpecError(options.source, "partition", plan.memory.problem)
    return 0


def _write_spec(opened: ModelFiles, source: str, file: Path) -> None:
    """Write a proposed spec with a path to its weights; never overwrites a file."""
    weights = os.path.relpath(opened.weights.resolve(), file.resolve().parent)
    text = propose_spec(opened, source if "://" in source else weights)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        reason = "is there already, and may have been changed"
        raise SpecError(file, "--propose-spec", reason) from error
