"""Values of config.json that no model has, refused by file and key."""

import functools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from maxstack.errors import ConfigError, quoted

log = logging.getLogger(__name__)


class Limit(NamedTuple):
    """Range of a key's number; null means that the key is not given."""

    keys: str
    """A pattern."""
    low: float
    high: float
    whole: bool = False


LIMITS = (
    Limit(r".*_eps|.*_epsilon", 1e-30, 0.1),
    Limit(r"rope_theta|rope_local_base_freq", 1.0, 1e12),
    Limit(r"factor", 1e-3, 1e6),
    Limit(r"initializer_range", 0.0, 100.0),
    Limit(
        r"num_(attention_heads|key_value_heads|hidden_layers)|n_(head|layer)", 1, 1e5, whole=True
    ),
    Limit(r"(hidden|vocab)_size|head_dim|n_embd", 1, 1e9, whole=True),
    Limit(r"max_position_embeddings|n_positions", 1, 1e12, whole=True),
    Limit(r"num_\w+|n_\w+|\w+_size|\w+_dim", 0, 1e12),
)
"""The first whose pattern fits the key counts. Published models lie far inside of these."""
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_numbers(config: Mapping[str, Any], where: str) -> None:
    """ConfigError for a number that is out of LIMITS; a line for ids of special tokens
    outside of the vocabulary, of which -1 for padding is transformers' word for none."""
    for path, key, value in _values(config, ""):
        number = type(value) in (int, float)
        limit = next((limit for limit in LIMITS if re.fullmatch(limit.keys, key)), None)
        if limit is None or value is None or (isinstance(value, list) and not limit.whole):
            continue
        if not number or not limit.low <= value <= limit.high or (limit.whole and value % 1):
            kind = "a whole number" if limit.whole else "a number"
            said = f"must be {kind} from {limit.low:g} to {limit.high:g}"
            raise ConfigError(f"{where}: {path}={quoted(value)}: {said}")
    if isinstance(vocab := config.get("vocab_size"), int):  # a family's table needs it
        check_ids(config, IDS, vocab, where)


def check_ids(config: Mapping[str, Any], keys: Iterable[str], vocab: int, where: str) -> None:
    """Tell where a key holds an id that a vocabulary of that size has not, which only whoever
    waits for it needs. ConfigError for what is no id."""
    for key in keys:
        ids = config.get(key)
        for token in ids if isinstance(ids, list) else [ids]:
            if token is None or (token == -1 and key == "pad_token_id"):
                continue
            if type(token) is not int:
                raise ConfigError(f"{where}: {key}={quoted(ids)}: must be the id of a token")
            if not 0 <= token < vocab:
                _tell(where, f"{key}={quoted(ids)}", vocab)


@functools.cache
def _tell(where: str, said: str, vocab: int) -> None:
    log.warning("%s: %s: the vocabulary has %d tokens (vocab_size)", where, said, vocab)


def _values(config: Mapping[str, Any], before: str) -> Iterator[tuple[str, str, Any]]:
    """(path, key, value) of whatever is no mapping, also in mappings."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _values(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", key, value
