"""Forms of uploads (multipart/form-data): in pieces, and what is refused."""

import io

import pytest

from jinfer.server.http.http_errors import ApiError
from jinfer.server.openai.files import MultipartParser, boundary_of


def parsed(body: bytes, piece: int) -> tuple[dict[str, str], str | None, bytes]:
    """Fields, name and content of the file of a body that comes in pieces."""
    content = io.BytesIO()
    content.close = lambda: None  # type: ignore[method-assign]
    parser = MultipartParser(b"b1", "file", lambda: content)
    for begin in range(0, len(body), piece):
        parser.push(body[begin : begin + piece])
    parser.finish()
    return parser.fields, parser.filename, content.getvalue()


FORM = (
    b'preamble\r\n--b1\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b1\r\n'
    b'Content-Disposition: form-data; name="file"; filename="a \xc3\xa9.jsonl"\r\n'
    b"Content-Type: text/plain\r\n\r\nx\r\n--b\r\n\r\n--b1--\r\nepilogue"
)


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
def test_a_form_in_pieces(piece: int) -> None:
    expected = ({"purpose": "batch"}, "a é.jsonl", b"x\r\n--b\r\n")
    assert parsed(FORM, piece) == expected


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (FORM[:-20], "ends before"),
        (b"", "ends before"),
        (b"--b1\r\nContent-Type: a\r\n\r\nx\r\n--b1--", "has no name"),
        (b"--b1xy", "follows a boundary"),
        (b"--b1\r\n" + b"a" * 9000, "headers have more"),
        (FORM.replace(b'"purpose"', b'"file"'), "file twice"),
        (FORM.replace(b"batch", b"a" * 70_000), "has more than"),
        (FORM.replace(b"batch", b"\xff"), "not UTF-8"),
        (b'--b1\r\nContent-Disposition: x; name="%d"\r\n\r\n\r\n' * 40 % (*range(40),), "parts"),
    ],
)
def test_a_form_that_is_wrong(body: bytes, reason: str) -> None:
    with pytest.raises(ApiError, match=reason):
        parsed(body, 100)


def test_boundaries() -> None:
    assert boundary_of('multipart/form-data; charset=utf-8; boundary="a b"') == b"a b"
    for wrong in ("", "application/json", "multipart/form-data", "multipart/mixed; boundary=a"):
        with pytest.raises(ApiError, match="multipart/form-data"):
            boundary_of(wrong)
