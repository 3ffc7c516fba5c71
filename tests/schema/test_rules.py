import pytest
from tiny_config import TINY

from maxstack.errors import ConfigError
from maxstack.load import load
from maxstack.schema import mesh_rules, objective, rules

BYTES = "data.sources.0={kind: text, files: [a.txt]}"
BROKEN = {
    "infinity": (
        ["model.norm.eps=.inf"],
        "model.norm.eps",
        "got inf; allowed: a number > 0, not infinite",
        [],
    ),
    "learned_positions": (
        ["model.positions=31"],
        "data.seq_len",
        "seq_len=32 is longer than the learned table of model.positions=31",
        ["model.positions=32"],
    ),
    "kv_ratio": (
        ["model.blocks.full.mixer.kv_heads=3"],
        "model.blocks.full.mixer.kv_heads",
        "heads=4 is not a multiple of kv_heads=3 (ratio 1.33)",
        ["model.blocks.full.mixer.kv_heads=2"],
    ),
    "two_free_axes": (["mesh.fsdp=-1"], "mesh.fsdp", "data and fsdp are both -1", ["mesh.fsdp=2"]),
    "empty_axis": (["mesh.tensor=0"], "mesh.tensor", "got 0", ["mesh.tensor=1"]),
    "unknown_logical_axis": (
        ["mesh.rules.embde=fsdp"],
        "mesh.rules.embde",
        "did you mean embed?",
        None,
    ),
    "unknown_mesh_axis": (
        ["mesh.rules.mlp=tensr"],
        "mesh.rules.mlp",
        "did you mean tensor?",
        ["mesh.rules.mlp=tensor"],
    ),
    "unknown_mesh_axis_in_list": (
        ["mesh.rules.mlp=[fsdp, x]"],
        "mesh.rules.mlp",
        "got mesh axis 'x'; allowed: slices, stage, data, fsdp, expert, context, tensor",
        ["mesh.rules.mlp=[fsdp]"],
    ),
    "axis_spent_twice_in_one_rule": (
        ["mesh.rules.vocab=[fsdp, fsdp]"],
        "mesh.rules.vocab",
        "names mesh axis fsdp twice",
        ["mesh.rules.vocab=fsdp"],
    ),
    "elastic_without_pathways": (
        ["faults.elastic={}", "checkpoint.every=0", "mesh.fsdp=-1"],
        "faults.elastic",
        "is for one process that drives all slices, and runtime=jax starts one a host",
        ["runtime=pathways", "mesh.slices=2", "checkpoint.every=1", "mesh.fsdp=1"],
    ),
    "devices_do_not_fill_the_mesh": (
        ["run.virtual_devices=8", "mesh.data=2", "mesh.tensor=2"],
        "run.virtual_devices",
        "8 devices do not fill the mesh data=2 x tensor=2 = 4",
        ["run.virtual_devices=4"],
    ),
    "devices_are_no_multiple": (
        ["run.virtual_devices=3", "mesh.tensor=2"],
        "run.virtual_devices",
        "use a multiple of 2",
        ["run.virtual_devices=4"],
    ),
    "heads": (
        ["mesh.tensor=8", "mesh.rules.kv_heads=null"],
        "model.blocks.full.mixer.heads",
        "heads=4 is not divisible by mesh.tensor=8; use mesh.tensor=4",
        ["mesh.tensor=4"],
    ),
    "kv_heads": (
        ["mesh.tensor=4"],
        "model.blocks.full.mixer.kv_heads",
        "kv_heads=2 is not divisible by mesh.tensor=4; use mesh.tensor=2 or "
        "mesh.rules.kv_heads: null",
        ["mesh.rules.kv_heads=null"],
    ),
    "mlp": (
        ["mesh.tensor=2", "model.blocks.full.mlp.hidden=127"],
        "model.blocks.full.mlp.hidden",
        "hidden=127 is not divisible by mesh.tensor=2; use "
        "model.blocks.full.mlp.hidden=128 or mesh.rules.mlp: null",
        ["model.blocks.full.mlp.hidden=128"],
    ),
    "embed": (
        ["mesh.fsdp=2", "model.embed=63"],
        "model.embed",
        "embed=63 is not divisible by mesh.fsdp=2; use model.embed=64",
        ["model.embed=64"],
    ),
    "vocab": (
        ["mesh.fsdp=2", "mesh.tensor=2", "model.vocab=514"],
        "model.vocab",
        "vocab=514 is not divisible by mesh.tensor=2 x mesh.fsdp=2 = 4; use "
        "model.vocab=516 or mesh.rules.vocab: [tensor]",
        ["model.vocab=516"],
    ),
    "optimizer_rules": (
        [
            "mesh.data=8",
            "mesh.optimizer_rules={vocab: data}",
            "model.vocab=516",
            "train.batch_size=8",
        ],
        "model.vocab",
        "vocab=516 is not divisible by mesh.data=8; use model.vocab=520 or "
        "mesh.optimizer_rules.vocab: null",
        ["model.vocab=520"],
    ),
    "layers": (
        [
            "mesh.rules.layers=tensor",
            "mesh.rules.heads=null",
            "mesh.rules.kv_heads=null",
            "mesh.rules.mlp=null",
            "mesh.rules.vocab=null",
            "mesh.tensor=3",
            "data.seq_len=33",
        ],
        "model.layers",
        "mesh.tensor=3",
        ["model.layers=6"],
    ),
    "seq": (
        ["mesh.tensor=2", "data.seq_len=31"],
        "data.seq_len",
        "seq_len=31 is not divisible by mesh.tensor=2",
        ["data.seq_len=32"],
    ),
    "free_axis_with_known_devices": (
        ["run.virtual_devices=6", "mesh.tensor=2"],
        "train.batch_size",
        "does not divide over the 3 devices",
        ["train.batch_size=9"],
    ),
    "batch_over_devices": (
        ["mesh.data=2", "mesh.fsdp=2", "train.batch_size=6"],
        "train.batch_size",
        "over the 4 devices that share a batch (mesh data=2 x fsdp=2); use a batch_size "
        "that is a multiple of 4",
        ["train.batch_size=8"],
    ),
    "accumulate": (
        ["train.accumulate=3"],
        "train.accumulate",
        "batch_size=8 does not split into accumulate=3",
        ["train.batch_size=9"],
    ),
    "microbatch_over_devices": (
        ["train.accumulate=4", "mesh.fsdp=4"],
        "train.batch_size",
        "batch_size=8 / accumulate=4 = 2 rows does not divide",
        ["train.batch_size=16"],
    ),
    "eval_batch_over_devices": (
        ["mesh.fsdp=4", "eval.batch_size=6"],
        "eval.batch_size",
        "batch_size=6 does not divide over the 4 devices",
        ["eval.batch_size=8"],
    ),
    "bytes_vocabulary": (
        [BYTES, "model.vocab=256"],
        "model.vocab",
        "vocab=256 is too small for data.tokenizer kind bytes, which has 257 ids",
        ["model.vocab=257"],
    ),
    "eval_bytes_vocabulary": (
        [
            "data.sources.0.vocab=256",
            "model.vocab=256",
            "eval.data={sources: [{kind: text, files: [a]}]}",
        ],
        "model.vocab",
        "for eval.data.tokenizer kind bytes",
        ["model.vocab=257"],
    ),
    "synthetic_vocabulary": (
        ["data.sources.0.vocab=513"],
        "data.sources.0.vocab",
        "vocab=513 makes token ids that model.vocab=512 has no embedding for",
        ["data.sources.0.vocab=512"],
    ),
    "schedule_longer_than_the_run": (
        ["optimizer.schedule.warmup_steps=200"],
        "optimizer.schedule.warmup_steps",
        "train.steps=100",
        ["optimizer.schedule.warmup_steps=20"],
    ),
    "evaluation_without_documents": (
        ["eval.every=10"],
        "eval.every",
        "evaluation has no documents",
        ["data.sources.0.holdout=0.1"],
    ),
    "baselines_without_evaluation": (
        ["eval.baselines=true"],
        "eval.baselines",
        "eval.every is 0",
        ["eval.every=10", "data.sources.0.holdout=0.1"],
    ),
    "best_checkpoint_without_evaluation": (
        ["checkpoint.keep_best=1"],
        "checkpoint.keep_best",
        "eval.every is 0",
        ["eval.every=10", "data.sources.0.holdout=0.1"],
    ),
    "early_end_without_evaluation": (
        ["train.stop_early={}"],
        "train.stop_early",
        "eval.every is 0",
        ["eval.every=10", "data.sources.0.holdout=0.1"],
    ),
    "best_checkpoint_by_what_has_no_direction": (
        ["checkpoint.keep_best=eval_length", "eval.every=10", "data.sources.0.holdout=0.1"],
        "checkpoint.keep_best",
        "write +eval_length or -eval_length",
        ["checkpoint.keep_best=+eval_length"],
    ),
    "a_run_in_a_bucket": (
        ["run.output_dir=gs://bucket/runs"],
        "run.output_dir",
        "gs://bucket/runs is a URL, and object storage has no locks and no appending",
        ["run.output_dir=/mnt/bucket/runs"],
    ),
    "a_tier_in_a_bucket": (
        ["checkpoint.tiers=[{path: 'gs://bucket/runs'}]"],
        "checkpoint.tiers.0.path",
        "gs://bucket/runs is a URL, and a step is finished by renaming files",
        ["checkpoint.tiers.0.path=/mnt/bucket/runs"],
    ),
    "two_tiers_in_one_folder": (
        ["checkpoint.tiers=[{path: a}, {path: ./a}]"],
        "checkpoint.tiers.1.path",
        "is also that of checkpoint.tiers.0",
        ["checkpoint.tiers.1.path=b"],
    ),
    "process_out_of_count": (
        ["distributed={coordinator: 'a:1', processes: 2, process: 2}"],
        "distributed.process",
        "process=2 is not one of the 2",
        ["distributed.process=1"],
    ),
    "coordinator_without_port": (
        ["distributed={coordinator: a, processes: 2, process: 1}"],
        "distributed.coordinator",
        "got 'a'",
        ["distributed.coordinator='a:1'"],
    ),
    "rounds_without_stages": (
        ["mesh.rounds=2"],
        "mesh.rounds",
        "rounds=2 is for a pipeline, but mesh.stage is 1",
        ["mesh.rounds=1"],
    ),
    "layers_over_stages": (
        ["mesh.stage=4"],
        "mesh.stage",
        "repeats 2 times, which is not divisible by mesh.stage=4; use mesh.stage=2",
        ["mesh.stage=2"],
    ),
    "microbatches_over_stages": (
        ["mesh.stage=2", "mesh.microbatches=3"],
        "mesh.microbatches",
        "is not a multiple of mesh.stage=2; use 4",
        ["mesh.microbatches=4"],
    ),
    "rows_over_microbatches": (
        ["mesh.stage=2", "mesh.fsdp=2", "mesh.microbatches=8"],
        "train.batch_size",
        "use a multiple of 16",
        ["train.batch_size=16"],
    ),
    "ring_over_an_odd_length": (
        ["mesh.context=2", "data.seq_len=34"],
        "data.seq_len",
        "is not divisible by 2 x mesh.context=2",
        ["data.seq_len=36"],
    ),
    "ulysses_over_few_heads": (
        ["mesh.context=8", "mesh.context_kind=ulysses"],
        "mesh.context_kind",
        "4 heads over mesh.context=8",
        ["mesh.context=4"],
    ),
    "experts_without_a_mixture": (
        ["mesh.expert=2"],
        "mesh.expert",
        "no block of the model has a mixture of experts; use mesh.fsdp=2",
        ["mesh.expert=1"],
    ),
    "profile_beyond_the_run": (
        ["train.profile={start: 98, steps: 3}"],
        "train.profile",
        "reach beyond train.steps=100",
        ["train.profile.start=97"],
    ),
}


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yml").write_text(TINY)
    return "tiny.yml"


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_names_its_key_and_what_to_do(tiny, case):
    overrides, key, says, _ = BROKEN[case]
    with pytest.raises(ConfigError) as caught:
        load(tiny, overrides)
    first = str(caught.value).splitlines()[0]
    assert f": {key}: " in first and says in first


@pytest.mark.parametrize("case", [case for case, (*_, remedy) in BROKEN.items() if remedy])
def test_the_remedy_is_accepted(tiny, case):
    overrides, _, _, remedy = BROKEN[case]
    assert load(tiny, [*overrides, *remedy])


def test_a_mesh_axis_already_spent_on_a_tensor_does_not_constrain_its_later_axes(tiny):
    spent_on_vocab_and_batch = [
        "mesh.fsdp=2",
        "model.embed=63",
        "mesh.rules.embed=data",
        "mesh.data=1",
    ]
    assert load(tiny, spent_on_vocab_and_batch)
    with pytest.raises(ConfigError, match="embed=63 is not divisible by mesh.fsdp=2"):
        load(tiny, ["mesh.fsdp=2", "model.embed=63"])


def test_several_broken_rules_are_told_together(tiny):
    with pytest.raises(ConfigError) as caught:
        load(tiny, ["eval.baselines=true", "checkpoint.keep_best=1", "train.accumulate=3"])
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == [
        "train.accumulate",
        "eval.baselines",
        "checkpoint.keep_best",
    ]


def test_records_of_two_kinds_are_not_mixed_in_one_row(tiny, monkeypatch):
    kinds = ("pairs", "labelled")
    monkeypatch.setattr(objective.PreferenceConfig, "RECORDS", kinds)
    source = "{{kind: jsonl, files: [a.jsonl], record: {{kind: {}}}}}"
    for some in (kinds[:1], kinds[1:], kinds):
        sources = ", ".join(source.format(kind) for kind in some)
        words = ["objective={kind: preference}", f"data.sources=[{sources}]", "eval.every=0"]
        if some == kinds:
            with pytest.raises(ConfigError, match="data.sources: labelled and pairs are in one"):
                load(tiny, words)
        else:
            assert load(tiny, words)


def test_what_hangs_on_the_number_of_devices_is_checked_once_it_is_known(tiny):
    cfg = load(tiny, ["train.batch_size=6"])
    assert {axis: size for axis, size in mesh_rules.mesh_sizes(cfg, 4).items() if size > 1} == {
        "data": 4
    }
    assert rules.device_faults(cfg, 3) == []
    assert [key for key, _ in rules.device_faults(cfg, 4)] == ["train.batch_size"]


def test_a_fault_inside_a_list_names_the_line_of_its_item(tiny, tmp_path):
    (tmp_path / "run.yml").write_text(
        "extends: ./tiny.yml\noptimizer:\n  chain:\n  - kind: clip_by_global_norm\n    "
        "max_norm: 1.0\n  - kind: adamw\n    b3: 1\n"
    )
    with pytest.raises(ConfigError, match=r"^run.yml:7: optimizer.chain.1.b3: "):
        load("run.yml")
