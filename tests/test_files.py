from __future__ import annotations

from pathlib import Path

import pytest

from gvm_stream.errors import StreamError
from gvm_stream.files import write_atomically
from tests.doubles import mounted


def test_content_is_written_into_folders_made_for_it_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "state"
    write_atomically(path, b"first, and longer")
    write_atomically(path, b"second")
    assert path.read_bytes() == b"second"
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    with mounted(tmp_path, "size=1m"):
        path = tmp_path / "state"
        write_atomically(path, b"old")
        with pytest.raises(StreamError, match=f"{path} cannot be written: No space left on device"):
            write_atomically(path, bytes(2 << 20))
        assert path.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [path]


def test_a_file_system_without_writing_is_one_sentence(tmp_path: Path) -> None:
    with mounted(tmp_path, "ro"), pytest.raises(StreamError, match="Read-only file system"):
        write_atomically(tmp_path / "state", b"x")


def test_a_path_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(StreamError, match="cannot be written: Not a directory"):
        write_atomically(tmp_path / "file" / "folder" / "state", b"x")
    with pytest.raises(StreamError, match="cannot be written: Is a directory"):
        write_atomically(tmp_path, b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert [path.name for path in tmp_path.parent.iterdir() if path.name.endswith(".tmp")] == []
