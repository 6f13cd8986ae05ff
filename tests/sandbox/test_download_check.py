"""What lies under a file's name in place of the file is called what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from jinfer.sandbox.download_check import failed_download, read_downloaded
from jinfer.sandbox.safe_files import FileRefusedError
from jinfer.tokenizer import TokenizerError, load_tokenizer


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid", "is a Git LFS pointer"),
        (b"\n <!doctype HTML><title>Sign in</title>", "is an HTML page"),
        (b'<?xml version="1.0"?>\n<html>', "is an HTML page"),
        (b"Entry not found", "'Entry not found'"),
        (b"404: Not Found", "'404: Not Found'"),
        (b"Invalid username or password.", "'Invalid username or password.'"),
        (b'{"error": "Repository not found"}\n', "'Repository not found'"),
        (b'{"message": "x", "error": {"code": 401}}', "{'code': 401}"),
    ],
)
def test_failed_downloads(data: bytes, told: str) -> None:
    assert told in failed_download(data, len(data))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b'{"error": ""}',
        b'{"error": 1, "architectures": ["X"]}',
        b"not found in the vocabulary",
        b"the\nof\nnot found\n",
        b"<unk>\n<s>\n</s>",
        b"<|endoftext|>",
        b"\xff\xfe<html>",
        b"{% for message in messages %}<html>",
    ],
)
def test_valid_files(data: bytes) -> None:
    assert failed_download(data, len(data)) == ""


def test_error_message_must_be_the_whole_file() -> None:
    assert failed_download(b'{"error": "x"}' + b" " * 498, 9999) == ""


def test_tokenizer_that_is_a_git_lfs_pointer(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(FileRefusedError, match="git lfs pull"):
        read_downloaded(path, 1000)
    with pytest.raises(TokenizerError, match=r"tokenizer.json: is a Git LFS pointer"):
        load_tokenizer(tmp_path)
