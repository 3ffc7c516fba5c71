"""Files from one process's disk to another's: two servers in this process."""

import contextlib
import socket
import threading
from types import SimpleNamespace

import pytest

from maxstack.checkpoint.peer_files import PURPOSE, PeerFiles
from maxstack.cluster.connections import connect

KEY = b"k" * 64


@pytest.mark.filterwarnings("error")
def test_peers_get_files_below_the_folder_and_strangers_nothing(tmp_path):
    meet, addresses, made = threading.Barrier(2), [None, None], [None, None]

    def make(number):
        def exchange(topic, value):
            addresses[number] = value
            meet.wait(30)
            return [*addresses]

        folder = tmp_path / f"{number}"
        folder.mkdir()
        (folder / "shard").write_bytes(bytes(range(256)) * 50_000)
        peers = SimpleNamespace(
            number=number, count=2, key=KEY, own_address=lambda: "127.0.0.1", exchange=exchange
        )
        made[number] = PeerFiles(folder, peers)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    (tmp_path / "secret").write_text("secret")
    with socket.create_connection(addresses[1]) as silent:  # it holds nothing
        assert b"".join(made[0].fetch(1, "shard")) == bytes(range(256)) * 50_000
        for name in ("../secret", "/etc/hostname", "none", "."):
            with pytest.raises(OSError, match="no such file"):
                next(made[0].fetch(1, name))
        with pytest.raises(OSError):
            connect(addresses[1], b"o" * 64, PURPOSE)
        with pytest.raises(OSError):
            connect(addresses[1], KEY, "watchdogs")
        for message in (b"\xff", b"a\0b", b"x" * (1 << 17)):
            with connect(addresses[1], KEY, PURPOSE) as found, contextlib.suppress(OSError):
                found.send_bytes(message)
        assert len(silent.recv(1000)) == 32
    assert b"".join(made[0].fetch(1, "shard"))
