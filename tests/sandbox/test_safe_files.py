"""Only regular files are read, and never more of them than is asked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jinfer.sandbox.safe_files import FileRefusedError, path_exists, read_regular_file


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
