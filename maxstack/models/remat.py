"""Rematerialisation of a block by the policy that the configuration names."""

from collections.abc import Callable
from typing import Any

import jax

from maxstack.models import pipeline
from maxstack.schema.stack import RematConfig


def remat(cfg: RematConfig, f: Callable[..., Any], staged: bool = False) -> Callable[..., Any]:
    """`f`, whose backward pass keeps what the policy names and recomputes the rest; `staged` inside
    a pipeline, where `f` slices its weights out of a stack."""
    if cfg.policy == "none" and not staged:
        return f
    of_jax = jax.checkpoint_policies
    policies = {
        "none": pipeline.save_computed,
        "full": of_jax.nothing_saveable,
        "dots": of_jax.dots_saveable,
        "dots_no_batch": of_jax.dots_with_no_batch_dims_saveable,
        "save": of_jax.save_only_these_names(*cfg.names),
        "offload": of_jax.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(cfg.names),
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }
    return jax.checkpoint(f, policy=policies[cfg.policy], prevent_cse=False)
