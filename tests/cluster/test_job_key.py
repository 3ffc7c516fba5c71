"""The key of a job: where processes find it, and who else may."""

import pytest

from maxstack.cluster import job_key
from maxstack.errors import ConfigError


def test_child_processes_do_not_get_the_launchers_key(tmp_path, monkeypatch):
    monkeypatch.setenv(job_key.VARIABLE, "k" * 64)
    with job_key.share(tmp_path / "run", True) as find:
        assert find() == b"k" * 64 and job_key.VARIABLE not in job_key.os.environ
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["secret", "k" * 31, "k" * 2000])
def test_a_key_that_can_be_guessed_is_refused(key, tmp_path, monkeypatch):
    monkeypatch.setenv(job_key.VARIABLE, key)
    with (
        pytest.raises(ConfigError, match=f"has {len(key)} characters; give all processes"),
        job_key.share(tmp_path, False),
    ):
        pass


def test_process_0_shares_a_drawn_key_by_a_private_file(tmp_path):
    (tmp_path / job_key.FILE).write_text("of an earlier start, or of who sent the folder")
    with job_key.share(tmp_path, True) as first, job_key.share(tmp_path, False) as other:
        assert len(first()) == 64 and other() == first()
        assert (tmp_path / job_key.FILE).stat().st_mode & 0o777 == 0o600
    assert not [*tmp_path.iterdir()]


def test_a_missing_key_names_the_file_and_the_remedy(tmp_path):
    with (
        job_key.share(tmp_path, False) as find,
        pytest.raises(
            OSError, match="all hosts must see run.output_dir, or give all processes MAX"
        ),
    ):
        find()


def test_an_unwritable_folder_is_a_config_error(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="run.output_dir: cannot write to "),
        job_key.share(tmp_path / "file" / "run", True),
    ):
        pass
