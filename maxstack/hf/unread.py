"""Keys of config.json that no table of a family reads. transformers ignores what its class does not
read, and tensors that are more or fewer than a model's are refused elsewhere, so that only a key
that changes arithmetic without a tensor could make a silently wrong model."""

import functools
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from maxstack.config.annotations import listed

log = logging.getLogger(__name__)
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
"""Fields of transformers' PretrainedConfig and GenerationConfig, those of training's losses, and
marks of tools."""
PATTERNS = re.compile(
    r"""_.* | .*_tokens? | .*_token_ids? | .*_token_index | output\w*_\w* | return_\w* | .*dropout.*
    | .*_pdrop | .*_version | unsloth_\w* | .*checkpoint.*_enabled | .*parallel.* | use_flash\w*""",
    re.VERBOSE,
)
"""Keys of special tokens, of what is returned, and of training's and a machine's settings."""
DANGEROUS = re.compile(
    "scal|cap|norm|rope|rotary|window|mask|attn|attention|bias|act|expert|router|layer|head|mod"
    "|clip|residual|multiplier"
)
"""What is in the name of a key that may change arithmetic."""


def passed_over(key: str, value: Any) -> bool:
    """True for a key that cannot change what a model computes, or whose value says nothing."""
    if key in FIELDS or PATTERNS.fullmatch(key) or value in (None, [], {}):
        return True
    if value is False:
        return key.endswith("_bias") or key == "use_sliding_window"
    return value == 0 and key.startswith("shared_expert")


def refused(config: Mapping[str, Any], known: Iterable[str], where: str) -> list[str]:
    """Keys that are neither known nor passed over, and may change arithmetic; the others are told,
    once for each file."""
    known = {*known}
    unread = [
        key for key, value in config.items() if key not in known and not passed_over(key, value)
    ]
    dangerous = sorted(key for key in unread if DANGEROUS.search(key))
    if not dangerous and unread:
        _tell(where, listed(sorted(unread)))
    return dangerous


def other_class(config: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The class of `auto_map` that computes a model otherwise than the classes of these names do by
    themselves; None where there is none."""
    given = config.get("auto_map")
    names = {*names}
    for key, value in given.items() if isinstance(given, Mapping) else ():
        name = str(value).rpartition(".")[2]
        if key.startswith("AutoModel") and value and name not in names:
            return name
    return None


@functools.cache
def _tell(where: str, keys: str) -> None:
    log.warning("%s: keys that the family does not read, passed over: %s", where, keys)
