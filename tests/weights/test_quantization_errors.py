"""Errors of quantization, summed while layers compute."""

import threading
import time

from maxstack.weights.quantization_errors import Errors


class Slow(float):
    """A number that other threads overtake while it is read."""

    def __float__(self) -> float:
        time.sleep(0.02)
        return super().__float__()


def test_no_device_s_part_is_lost_where_several_tell_at_once():
    errors = Errors()
    threads = [
        threading.Thread(target=errors.add, args=("gate", 0, Slow(4.0), Slow(1.0 + i)))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors.relative() == {("gate", 0): (36 / 32) ** 0.5}
