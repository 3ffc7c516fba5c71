"""Mistakes in a chain are found before jax is imported, and explained."""

import pydantic
import pytest

from maxstack.schema.optimizer import OptimizerConfig


def refused(**optimizer):
    with pytest.raises(pydantic.ValidationError) as caught:
        OptimizerConfig(**optimizer)
    found = caught.value.errors()[0]
    return ".".join(map(str, [*found["loc"], found["ctx"]["key"]])), found["ctx"]["message"]


@pytest.mark.parametrize(
    "item, key, words",
    [
        ({"kind": "adamww"}, "chain.0.kind", "did you mean adamw"),
        ({"kind": "huber_loss"}, "chain.0.kind", "not a transform"),
        ({"kind": 3}, "chain.0.kind", "wanted a name"),
        ({"b2": 0.9}, "chain.0", "a mapping with a kind"),
        ("adamw", "chain.0", "a mapping with a kind"),
        ({"kind": "adamw", "beta2": 0.95}, "chain.0.beta2", "did you mean b2"),
        ({"kind": "clip_by_global_norm"}, "chain.0", "needs max_norm"),
        ({"kind": "adamw", "b2": "high"}, "chain.0.b2", "wanted a number"),
        ({"kind": "adamw", "b2": None}, "chain.0.b2", "cannot be left empty"),
        ({"kind": "adamw", "nesterov": 1}, "chain.0.nesterov", "true or false"),
        ({"kind": "adamw", "mu_dtype": "float31"}, "chain.0.mu_dtype", "bfloat16"),
        ({"kind": "adamw", "mask": "blocks/*"}, "chain.0.mask", "a list of patterns"),
        ({"kind": "adamw", "mask": ["!embed"]}, "chain.0.mask", "selects nothing"),
        (
            {"kind": "adamw", "learning_rate": {"kind": "cosine", "init_value": 1.0, "alfa": 1}},
            "chain.0.learning_rate.alfa",
            "alpha",
        ),
        (
            {"kind": "muon", "preconditioning": "frobenious"},
            "chain.0.preconditioning",
            "did you mean frobenius",
        ),
        (
            {"kind": "muon", "muon_weight_dimension_numbers": 1},
            "chain.0.muon_weight_dimension_numbers",
            "cannot be set",
        ),
        ({"kind": "adopt", "clip_value_fn": 1.0}, "chain.0.clip_value_fn", "Python function"),
        (
            {"kind": "lookahead", "sync_period": 5, "slow_step_size": 0.5},
            "chain.0",
            "fast_optimizer (or inner)",
        ),
        (
            {
                "kind": "lookahead",
                "sync_period": 5,
                "slow_step_size": 0.5,
                "inner": [{"kind": "sgdd"}],
            },
            "chain.0.inner.0.kind",
            "mean sgd",
        ),
        (
            {"kind": "MultiSteps", "every_k_schedule": 0, "inner": {"kind": "sgd"}},
            "chain.0.every_k_schedule",
            "at least 1",
        ),
        (
            {
                "kind": "MultiSteps",
                "every_k_schedule": 2,
                "inner": {"kind": "sgd"},
                "opt": {"kind": "sgd"},
            },
            "chain.0.inner",
            "give one",
        ),
        (
            {"kind": "schedule_free_adamw", "warmup_steps": 0},
            "chain.0.warmup_steps",
            "null for no warm-up",
        ),
        ({"kind": "flatten", "inner": {"kind": "adamw"}}, "chain.0.inner.mask", "set mask: null"),
        (
            {"kind": "galore", "base_optimizer": {"kind": "adamw"}},
            "chain.0.base_optimizer.mask",
            "set mask: null",
        ),
        (
            {"kind": "flatten", "inner": {"kind": "clip_by_block_rms", "threshold": 1.0}},
            "chain.0.inner.kind",
            "outside flatten",
        ),
        ({"kind": "scale_by_adam"}, "chain", "scale_by_learning_rate"),
    ],
)
def test_a_mistaken_item_is_explained(item, key, words):
    got, message = refused(chain=[item])
    assert got == key and words in message


@pytest.mark.parametrize(
    "kind, words",
    [
        ("sophia", "differentiates the loss again"),
        ("scale_by_zoom_linesearch", "several times"),
        ("dpsgd", "each example"),
        ("chain", "a list of items"),
        ("partition", "optimizer.groups"),
    ],
)
def test_what_cannot_work_in_one_jitted_step_is_refused_with_the_reason(kind, words):
    got, message = refused(chain=[{"kind": kind}])
    assert got == "chain.0.kind" and words in message


def test_lbfgs_works_without_its_line_search_only():
    assert "linesearch: null" in refused(chain=[{"kind": "lbfgs"}])[1]
    assert OptimizerConfig(chain=[{"kind": "lbfgs", "linesearch": None}])


def test_sam_works_on_consecutive_batches_only():
    item = {"kind": "sam", "optimizer": {"kind": "sgd"}, "adv_optimizer": {"kind": "sgd"}}
    assert "consecutive batches" in refused(chain=[item | {"opaque_mode": True}])[1]
    assert OptimizerConfig(chain=[item])


@pytest.mark.parametrize(
    "optimizer, key",
    [
        ({"learning_rate": "fast"}, "learning_rate"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"chain": []}, "chain"),
        ({"decay": "*"}, "decay"),
        ({"groups": [{"match": "*", "chain": [{"kind": "sgd"}]}]}, "groups.0.match"),
        ({"ema": {"start": "soon"}}, "ema.start"),
    ],
)
def test_a_mistake_elsewhere_in_the_section_names_its_key(optimizer, key):
    assert refused(**optimizer)[0].strip(".") == key


def test_a_shared_chain_before_groups_must_not_apply_the_learning_rate_too():
    key, message = refused(
        chain=[{"kind": "adamw"}], groups=[{"match": ["*"], "chain": [{"kind": "adamw"}]}]
    )
    assert key == "chain.0" and "groups do so again" in message


def test_a_transform_with_a_constant_rate_refuses_the_shared_schedule():
    assert "constant learning rate only" in refused(chain=[{"kind": "sm3"}])[1]
    assert OptimizerConfig(chain=[{"kind": "sm3"}], schedule=None) and OptimizerConfig(
        chain=[{"kind": "sm3", "learning_rate": 0.1}]
    )


def test_groups_without_a_chain_are_preceded_by_clipping_alone():
    assert [
        item["kind"]
        for item in OptimizerConfig(groups=[{"match": ["*"], "chain": [{"kind": "adamw"}]}]).chain
    ] == ["clip_by_global_norm"]


def test_a_resolved_configuration_reads_back_unchanged():
    for cfg in (
        OptimizerConfig(),
        OptimizerConfig(learning_rate={"kind": "constant", "value": 1.0}, ema={"decay": 0.9}),
    ):
        assert OptimizerConfig(**cfg.model_dump()) == cfg


def test_a_copy_with_an_update_is_checked_and_parsed_again():
    cfg = OptimizerConfig().model_copy(update={"chain": [{"kind": "sgd"}], "learning_rate": 0.5})
    assert [item.signature.name for item in cfg.parsed.items()] == ["sgd"]
    assert cfg.parsed.learning_rate == 0.5
    with pytest.raises(pydantic.ValidationError, match="did you mean sgd"):
        cfg.model_copy(update={"chain": [{"kind": "sgdd"}]})


def test_items_are_parsed_once_with_their_keys_and_the_steps_between_their_updates():
    inner = {"kind": "MultiSteps", "every_k_schedule": 3, "inner": [{"kind": "adamw"}]}
    chain = [{"kind": "MultiSteps", "every_k_schedule": 2, "opt": inner}]
    cfg = OptimizerConfig(chain=[], groups=[{"match": ["*"], "chain": chain}])
    assert [(item.signature.name, item.key, item.every) for item in cfg.parsed.items()] == [
        ("MultiSteps", "groups.0.chain.0", 1),
        ("MultiSteps", "groups.0.chain.0.opt", 2),
        ("adamw", "groups.0.chain.0.opt.inner.0", 6),
    ]
    assert cfg.parsed is cfg.parsed
