"""What is no file is refused, and not waited for."""

import os
import signal
import socket
from pathlib import Path

import pytest

from maxstack import load
from maxstack.commands import serve
from maxstack.config import storage
from maxstack.data.chat import read_chat_template
from maxstack.data.tokenizers import open_tokenizer
from maxstack.errors import ConfigError, DataError
from maxstack.hf.contents import Contents
from maxstack.inference.generation import read_prompts
from maxstack.regular_file import open_regular, read_regular
from maxstack.schema.data import HuggingFaceTokenizer

READERS = {
    "a configuration": lambda path: load.load_alone(f"{path}.yml"),
    "what it extends": lambda path: load.load_alone({"extends": f"{path}.yml"}),
    "a tokenizer": lambda path: open_tokenizer(HuggingFaceTokenizer(kind="huggingface", path=path)),
    "prompts": read_prompts,
    "keys": serve._read_keys,
    "a template": lambda path: read_chat_template(Path(path).parent, path),
    "a URL": lambda path: storage.read(f"file://{path}"),
    "a model": lambda path: Contents(Path(path).parent, weights=False),
    "a file": open_regular,
}


@pytest.fixture(autouse=True)
def in_time():
    """TimeoutError where something waits."""

    def stop(*_):
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 5)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_is_refused_and_not_waited_for(reader, tmp_path):
    for name in ("pipe", "pipe.yml", "config.json"):
        os.mkfifo(tmp_path / name)
    with pytest.raises((ConfigError, DataError, OSError)) as raised:
        READERS[reader](str(tmp_path / "pipe"))
    assert not isinstance(raised.value, TimeoutError)


def test_a_device_and_a_socket_are_refused_by_what_they_are(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path in ("/dev/zero", tmp_path / "socket"):
            with pytest.raises(OSError, match="only files are read|No such device or address"):
                open_regular(path)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)


def test_a_file_of_keys_that_is_empty_has_no_key(tmp_path):
    (tmp_path / "keys").write_text("\n")
    with pytest.raises(ConfigError, match="keys: has no key"):
        serve._read_keys(str(tmp_path / "keys"))


def test_a_file_of_more_bytes_than_are_read_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(bytes(11))
    assert read_regular(tmp_path / "a", 11) == bytes(11)
    with pytest.raises(DataError, match="a: is larger than the limit of 10 bytes"):
        read_regular(tmp_path / "a", 10)
