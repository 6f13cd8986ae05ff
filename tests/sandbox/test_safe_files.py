"""Only regular files are read, and only up to the limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jinfer.sandbox.safe_files import (
    FileRefusedError,
    failed_download,
    path_exists,
    read_downloaded,
    read_regular_file,
)
from jinfer.tokenizer import TokenizerError, load_tokenizer


def test_reads_up_to_a_size(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    assert read_regular_file(path, 10) == b""
    path.write_bytes(b"0123456789")
    assert read_regular_file(path, 10) == b"0123456789"
    with pytest.raises(FileRefusedError, match="is larger than 9 bytes"):
        read_regular_file(path, 9)
    path.write_bytes(bytes(3 << 20))
    assert len(read_regular_file(path, 3 << 20)) == 3 << 20


def test_pipe_device_and_folder_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        assert path_exists(path)
        with pytest.raises(FileRefusedError, match="is not a regular file"):
            read_regular_file(path, 10)


@pytest.mark.parametrize("name", ["missing", "x" * 5000, "nul\0", "lone \ud800"])
def test_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    assert not path_exists(tmp_path / name)
    with pytest.raises(FileRefusedError, match="cannot be read: "):
        read_regular_file(tmp_path / name, 10)


def test_dangling_link_exists_and_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    assert path_exists(tmp_path / "link")
    with pytest.raises(FileRefusedError):
        read_regular_file(tmp_path / "link", 10)


@pytest.mark.parametrize(
    ("data", "shown"),
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
def test_failed_downloads(data: bytes, shown: str) -> None:
    assert shown in failed_download(data, len(data))


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
