"""Checks of config.json beyond a family's tables: numbers that no model has, and keys that no table
reads.

transformers ignores what its class does not read, and tensors that are more or fewer than a model's
are refused elsewhere, so only an unknown key that changes arithmetic without a tensor could make a
silently wrong model. Such a key is refused by its name; others are passed over.
"""

import functools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from maxstack.config.annotations import listed
from maxstack.errors import ConfigError, quoted

log = logging.getLogger(__name__)


class Limit(NamedTuple):
    """Range of the numbers of keys that match a pattern."""

    keys: str
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
"""The first whose pattern matches a key applies. Published models lie far inside of these."""
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
FIELDS = frozenset(
    """
    architectures assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight
    assistant_lookbehind attn_implementation auto_map aux_loss_alpha bad_words_ids
    begin_suppress_tokens cache_config cache_implementation chunk_size_feed_forward
    compile_config constraints continuous_batching_config cross_attention_hidden_size device_map
    disable_compile diversity_penalty do_sample dola_layers dtype early_stopping
    encoder_no_repeat_ngram_size encoder_repetition_penalty ep_size epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty finetuning_task force_words_ids gradient_checkpointing
    guidance_scale id2label initializer_range is_assistant is_decoder label2id length_penalty
    low_memory max_cache_len max_length max_matching_ngram_size max_new_tokens
    max_position_embeddings max_sequence_length max_time min_length min_new_tokens min_p
    model_name model_type no_repeat_ngram_size num_assistant_tokens
    num_assistant_tokens_schedule num_beam_groups num_beams num_labels num_return_sequences
    penalty_alpha prefill_chunk_size prefix problem_type prompt_lookup_num_tokens pruned_heads
    remove_invalid_values renormalize_logits repetition_penalty router_aux_loss_coef
    router_jitter_noise seq_aux sequence_bias speculation_type stop_strings suppress_tokens
    target_lookbehind task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    token_healing tokenizer_class top_h top_k top_p torch_dtype torchscript total_flos
    transformers.js_config typical_p use_bfloat16 use_cache use_mtp watermarking_config
    """.split()
)
"""Fields of transformers' PretrainedConfig and GenerationConfig, of training losses, of tools."""
PATTERNS = re.compile(
    r"""_.* | .*_tokens? | .*_token_ids? | .*_token_index | output\w*_\w* | return_\w* | .*dropout.*
    | .*_pdrop | .*_version | unsloth_\w* | .*checkpoint.*_enabled | .*parallel.* | use_flash\w*""",
    re.VERBOSE,
)
"""Keys of special tokens, of outputs, and of settings of training and of machines."""
DANGEROUS = re.compile(
    "scal|cap|norm|rope|rotary|window|mask|attn|attention|bias|act|expert|router|layer|head|mod"
    "|clip|residual|multiplier"
)
"""Parts of names of keys that may change arithmetic."""


def check_numbers(config: Mapping[str, Any], where: str) -> None:
    """ConfigError for a number outside of LIMITS; a warning for ids of special tokens outside of
    the vocabulary, where -1 for padding means none in transformers."""
    for path, key, value in _values(config, ""):
        # Not isinstance: True is no number of layers.
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
    """Warn of a key with an id outside of a vocabulary of that size: a mistake only if something
    waits for that token. ConfigError for what is no id."""
    for key in keys:
        ids = config.get(key)
        for token in ids if isinstance(ids, list) else [ids]:
            if token is None or (token == -1 and key == "pad_token_id"):
                continue
            if type(token) is not int:
                raise ConfigError(f"{where}: {key}={quoted(ids)}: must be the id of a token")
            if not 0 <= token < vocab:
                said = f"{key}={quoted(ids)}: the vocabulary has {vocab} tokens (vocab_size)"
                _warn(where, said)


def passed_over(key: str, value: Any) -> bool:
    """Return True for a key that cannot change what a model computes, or that has no value."""
    if key in FIELDS or PATTERNS.fullmatch(key) or value in (None, [], {}):
        return True
    # Of flags that are off, only these say nothing: another may switch off what a family always
    # computes.
    if value is False:
        return key.endswith("_bias") or key == "use_sliding_window"
    # No shared expert, said to a family that has none.
    return value == 0 and key.startswith("shared_expert")


def refused(config: Mapping[str, Any], known: Iterable[str], where: str) -> list[str]:
    """Return the keys that are neither known nor passed over and may change arithmetic; warn of the
    others once for each file."""
    known = {*known}
    unread = [
        key for key, value in config.items() if key not in known and not passed_over(key, value)
    ]
    dangerous = sorted(key for key in unread if DANGEROUS.search(key))
    # No warning beside the error that dangerous keys cause.
    if not dangerous and unread:
        keys = listed(sorted(unread))
        _warn(where, f"keys that the family does not read, passed over: {keys}")
    return dangerous


def other_class(config: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return the model class of `auto_map` that is none of these, or None."""
    given = config.get("auto_map")
    names = {*names}
    for key, value in given.items() if isinstance(given, Mapping) else ():
        # The code is never run, but a class of another name may compute otherwise.
        name = str(value).rpartition(".")[2]
        if key.startswith("AutoModel") and value and name not in names:
            return name
    return None


def _values(config: Mapping[str, Any], before: str) -> Iterator[tuple[str, str, Any]]:
    """Yield (path, key, value) of everything that is no mapping, at any depth."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _values(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", key, value


@functools.cache
def _warn(where: str, message: str) -> None:
    log.warning("%s: %s", where, message)
