"""Small plain data that the processes of a run exchange through jax's coordination service.

No device takes part, so a background thread may exchange while steps run; a collective of devices
would have to come in the same place of the program on all of them. Every process exchanges the same
topics in the same order.
"""

import itertools
import json
import socket
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax

from maxstack.cluster import job_key
from maxstack.errors import ConfigError

WAIT_MS = 600_000
"""Milliseconds that a process waits for the others."""
_TURNS: dict[str, Iterator[int]] = defaultdict(itertools.count)
"""How often this process has exchanged each topic."""


class Peers:
    """The processes of the run: `number` is this one's, of `count`."""

    def __init__(self) -> None:
        self.number, self.count = jax.process_index(), jax.process_count()

    @property
    def key(self) -> bytes:
        """The job's key, by which its processes authenticate each other."""
        return job_key.current

    @property
    def _client(self) -> Any:
        from jax._src import distributed

        client = distributed.global_state.client
        assert client is not None, "several processes have joined"
        return client

    def exchange(self, topic: str, value: Any, wait_ms: int = WAIT_MS) -> list[Any]:
        """Return every process's `value`, plain data, in their order. A topic belongs to one
        thread. RuntimeError where a process does not come."""
        if self.count == 1:
            return [json.loads(json.dumps(value))]
        client = self._client
        turn = next(_TURNS[topic])
        path = f"maxstack/{topic}"
        # By turn, so that a process that is ahead does not overwrite what others have yet to read.
        client.key_value_set(f"{path}/{turn}/{self.number}", json.dumps(value))
        # A barrier and one read of all: a read of each value would be N x N calls (64 processes:
        # 0.7 s instead of 0.14).
        client.wait_at_barrier(path, wait_ms)
        texts = {
            int(key.rpartition("/")[2]): text
            for key, text in client.key_value_dir_get(f"{path}/{turn}")
        }
        if turn:  # all have set this turn's value, so all have read the one before
            client.key_value_delete(f"{path}/{turn - 1}/{self.number}")
        return [json.loads(texts[number]) for number in range(self.count)]

    def post(self, topic: str, number: int, value: Any) -> None:
        """Post message `number` of a topic to all, without waiting."""
        self._client.key_value_set(f"maxstack/{topic}/{number}", json.dumps(value))

    def read_post(self, topic: str, number: int) -> Any:
        """Return message `number` of a topic; None where nobody has posted it yet."""
        try:
            return json.loads(self._client.key_value_try_get(f"maxstack/{topic}/{number}"))
        except jax.errors.JaxRuntimeError as error:
            # An absent key is told by this error alone.
            if not str(error).startswith("NOT_FOUND"):
                raise
            return None

    def barrier(self, topic: str) -> None:
        """Wait until all processes are here."""
        self.exchange(topic, None)

    def own_address(self) -> str:
        """Return the IPv4 address of the interface that reaches process 0; loopback where this
        process is alone. ConfigError where there is none."""
        from jax._src import distributed

        host = (distributed.global_state.coordinator_address or "127.0.0.1:1").rpartition(":")[0]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting sends nothing
            try:
                probe.connect((host, 1))
            except OSError as error:
                raise ConfigError(
                    f"distributed: {host}, where process 0 is, cannot be reached by IPv4 "
                    f"({error.strerror}), which watchdogs and copies of checkpoints use; give the "
                    "hosts such addresses, and one of them or its name as coordinator"
                ) from error
            return probe.getsockname()[0]
