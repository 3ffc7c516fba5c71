"""Folders of one user alone."""

import os
import stat

import pytest

from maxstack.config import trust
from maxstack.errors import ConfigError


def test_a_folder_is_made_for_this_user_alone(tmp_path):
    folder = trust.private(tmp_path / "a/b")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    assert stat.S_IMODE(trust.private(folder).stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_that_others_may_write_is_refused(mode, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(mode)
    with pytest.raises(ConfigError, match="others may write to it"):
        trust.private(tmp_path / "a")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path):
    (tmp_path / "a").mkdir(mode=0o755)
    os.chown(tmp_path / "a", 12345, -1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        trust.private(tmp_path / "a")
