"""Placeholders: the tokens of a prompt that stand for features of images, and texts around them.

A chat template writes a marker for each image. In texts of users `hide_marker` hides it, as
`Tokenizer.hide_control` hides the names of control tokens, so that no text becomes an image.
"""

from __future__ import annotations

from collections.abc import Sequence

from jinfer.images.decode_image import ImageError
from jinfer.images.prepared_image import NUMBER, PreparedImage
from jinfer.modelspec.image_table import ImageSpec
from jinfer.tokenizer import Tokenizer
from jinfer.tokenizer.tokenizer_base import MARK

type ImageRuns = tuple[tuple[int, int], ...]  # index of the first placeholder, and their number


def placeholder_id(tokenizer: Tokenizer, spec: ImageSpec) -> int:
    """Return the id of the placeholder. Raises `ImageError` if the vocabulary has none."""
    given = spec.placeholder
    found = tokenizer.id(given) if isinstance(given, str) else given
    if found is None or not tokenizer.token(found):
        raise ImageError(f"image.placeholder {given!r} is not a token of the vocabulary")
    return found


def image_marker(tokenizer: Tokenizer, spec: ImageSpec) -> str:
    """Return what stands for an image in a prompt's text."""
    return spec.layout.marker or tokenizer.token(placeholder_id(tokenizer, spec))


def hide_marker(text: str, marker: str) -> str:
    """Hide a marker in a text of a user; call it after `Tokenizer.hide_control`."""
    return text.replace(marker, f"{marker[0]}{MARK}{marker[1:]}")


def expand_placeholders(
    tokenizer: Tokenizer,
    text: str,
    images: Sequence[PreparedImage],
    spec: ImageSpec,
    *,
    special: bool = False,
) -> tuple[list[int], tuple[ImageRuns, ...]]:
    """Encode a prompt; each image's marker becomes its placeholders and the texts around them.

    Names of special tokens are parsed, except hidden ones.

    Args:
        special: add the special tokens that begin and end a text.

    Returns:
        The ids, and the runs of placeholders of each image.

    Raises:
        ImageError: there are more or fewer markers than images.
    """
    id = placeholder_id(tokenizer, spec)
    name, marker = tokenizer.token(id), image_marker(tokenizer, spec)
    parts = text.split(marker)
    if len(parts) - 1 != len(images):
        given = f"{len(images)} images are given"
        raise ImageError(f"the prompt has {len(parts) - 1} places for images ({marker}), {given}")
    pieces, counts = [hide_marker(parts[0], name)], list[tuple[int, int]]()
    for number, (image, after) in enumerate(zip(images, parts[1:], strict=True)):
        for piece in image.layout:
            if isinstance(piece, int):
                counts.append((number, piece))
            pieces.append(name if isinstance(piece, int) else piece.replace(NUMBER, str(number)))
        pieces.append(hide_marker(after, name))
    encoded = tokenizer.encode_marked("".join(pieces))
    if encoded.count(id) != len(counts):
        raise ImageError(f"the tokenizer does not parse {name!r}, the placeholder of images")
    ids: list[int] = [*tokenizer.special.prefix] if special else []
    runs: list[list[tuple[int, int]]] = [[] for _ in images]
    remaining = iter(counts)
    for token in encoded:
        number, count = next(remaining) if token == id else (0, 1)
        if token == id:
            runs[number].append((len(ids), count))
        ids += [token] * count
    ids += tokenizer.special.suffix if special else ()
    return ids, tuple(map(tuple, runs))
