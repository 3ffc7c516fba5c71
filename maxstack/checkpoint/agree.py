"""What the processes of a run tell each other beside the devices: small plain data, by way of jax's coordination service.

No device takes part, so a background thread may tell while steps run. Every process tells the same topics in the same order.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax

WAIT_MS = 600_000
"""How long a process waits for the slowest."""


class Processes:
    """This process and the others."""

    def __init__(self) -> None:
        self.number, self.count = jax.process_index(), jax.process_count()
        self._turns: dict[str, Iterator[int]] = defaultdict(itertools.count)

    def tell(self, topic: str, value: Any) -> list[Any]:
        """Every process's `value`, plain data, in their order. A topic belongs to one thread. RuntimeError where a process stays away."""
        if self.count == 1:
            return [json.loads(json.dumps(value))]
        from jax._src import distributed

        client, key = distributed.global_state.client, f"maxstack/{topic}/{next(self._turns[topic])}"
        assert client is not None, "several processes have joined"
        client.key_value_set(f"{key}/{self.number}", json.dumps(value))
        return [json.loads(client.blocking_key_value_get(f"{key}/{number}", WAIT_MS)) for number in range(self.count)]

    def wait(self, topic: str) -> None:
        """Until all processes are here."""
        self.tell(topic, None)
