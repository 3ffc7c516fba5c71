"""Other readers' view of a file or folder while it is written."""

import pytest

from maxstack.config import atomic


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_old_file_is_there_until_the_block_ends(tmp_path):
    path = tmp_path / "below" / "file"
    for text in ("old", "new"):
        with atomic.writing(path) as unfinished:
            unfinished.write_text(text)
            assert not path.exists() if text == "old" else path.read_text() == "old"
    assert path.read_text() == "new" and names(path.parent) == ["file"]


def test_a_block_that_raises_leaves_what_was_there_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="full"), atomic.writing(path) as unfinished:
        unfinished.write_text("ne")
        raise OSError("full")
    assert path.read_text() == "old" and names(tmp_path) == ["file"]


def test_what_a_killed_writer_left_of_a_folder_is_deleted_first(tmp_path):
    path = tmp_path / "folder"
    (tmp_path / f".folder{atomic.UNFINISHED}" / "old").mkdir(parents=True)
    path.mkdir()
    with atomic.writing(path) as unfinished:
        (unfinished / "new").mkdir(parents=True)
    assert names(tmp_path) == ["folder"] and names(path) == ["new"]


def test_writers_of_one_shared_file_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "file"
    with atomic.writing(path, shared=True) as first:
        first.write_text("first")
        with atomic.writing(path, shared=True) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first" and names(tmp_path) == ["file"]
