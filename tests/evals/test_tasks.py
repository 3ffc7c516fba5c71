"""Tasks asked of tiny models: scoring on meshes, packing, metrics and files."""

import json
import math

import asked
import jax
import numpy as np
import pytest
import tiny
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from maxstack.errors import ConfigError, DataError
from maxstack.evals.scoring import Scored, Scorer, Texts, pack
from maxstack.evals.task import Likelihood, Question
from maxstack.evals.task_files import open_tasks
from maxstack.evals.task_metrics import results, values
from maxstack.evals.tasks import flatten_metrics
from maxstack.inference.score import Rows, logprobs_of
from maxstack.schema.data import BytesTokenizer, HuggingFaceTokenizer

MESHES = {
    "fsdp": {"fsdp": 8},
    "tensor": {"data": 2, "tensor": 4, "rules": {"heads": "tensor", "kv_heads": None}},
    "ring": {"data": 2, "context": 4},
    "stages": {"stage": 2, "data": 2},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Task files but for generation, which is the engine's."""
    folder = tmp_path_factory.mktemp("tasks")
    return [name for name in asked.write_tasks(folder) if "generate" not in name]


@pytest.fixture(scope="module")
def alone(files):
    """Weights, and the results and records of one device."""
    run = asked.run_of()
    params = run.init().params
    return params, *asked.asked(run, files).results(params)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.slow
def test_a_mesh_scores_as_one_device_does(mesh, files, alone):
    params, found, records = alone
    devices = math.prod(size for size in MESHES[mesh].values() if isinstance(size, int))
    run = asked.run_of(devices, mesh=MESHES[mesh])
    placed = jax.tree.map(
        lambda leaf, like: jax.device_put(np.asarray(leaf), like.sharding),
        params,
        run.abstract.params,
    )
    there, others = asked.asked(run, files).results(placed)
    for name, metrics in found.items():
        for metric, value in metrics.items():
            assert there[name][metric] == pytest.approx(value, rel=3e-5), f"{name} {metric}"
    for ours, theirs in zip(records, others, strict=True):
        np.testing.assert_allclose(ours["answer"], theirs["answer"], rtol=2e-5)


def test_a_request_has_the_score_that_maxstack_score_gives_it(files, alone):
    params, _, records = alone
    run = asked.run_of()
    texts, (record, *_) = (
        Texts(run.cfg.data.tokenizer),
        (each for each in records if each["task"] == "choice"),
    )
    pairs = [texts.pair(*pair) for pair in record["requests"]]
    tokens = np.zeros((len(pairs), 64), np.int32)
    for row, pair in zip(tokens, pairs, strict=True):
        row[: len(pair.tokens)] = pair.tokens
    rows = Rows(tokens, np.array([len(pair.tokens) for pair in pairs], np.int32))
    found = logprobs_of(run, params, rows, 8)
    sums = [row[pair.begin :].sum() for row, pair in zip(found, pairs, strict=True)]
    np.testing.assert_allclose(record["answer"], sums, rtol=1e-5)


def test_logits_in_pieces_give_the_same_scores(files, alone, monkeypatch):
    params, _, records = alone
    monkeypatch.setattr("maxstack.evals.scoring.LOGITS", 8 * tiny.VOCAB * 4 * 16)
    run = asked.run_of()
    _, others = asked.asked(run, files).results(params)
    for ours, theirs in zip(records, others, strict=True):
        np.testing.assert_allclose(ours["answer"], theirs["answer"], rtol=1e-6)


def test_requests_in_rows_of_any_width_have_the_scores_that_they_have_alone(monkeypatch):
    monkeypatch.setattr("maxstack.evals.scoring.NARROWEST", 4)
    run, rng = asked.run_of(), np.random.default_rng(0)
    requests = []
    for length in [*range(2, 66), 2, 5, 9, 70]:
        tokens = rng.integers(0, 256, length).tolist()
        requests.append(Scored(tokens, int(rng.integers(1, length))))
        # other last tokens, as choices of a letter have
        requests.append(Scored([*tokens[:-1], 7], length - 1))
        requests += [Scored([*tokens[:-1], last], 1) for last in (8, 9, 10) if length < 66]
    params, scorer = run.init().params, Scorer(run, 8, 64)
    assert {batch.arrays["tokens"].shape[1] for batch in scorer._batches(requests[:-2])} == {
        4,
        16,
        64,
    }
    likelihoods = scorer(params, requests)
    kept = [tokens[-65:] for tokens, _ in requests]
    rows = np.zeros((len(kept), 65), np.int32)
    for row, tokens in zip(rows, kept, strict=True):
        row[: len(tokens)] = tokens
    alone = logprobs_of(run, params, Rows(rows, np.array([*map(len, kept)], np.int32)), 8)
    for made, row, (tokens, begin) in zip(likelihoods, alone, requests, strict=True):
        scored = len(tokens) - max(begin, len(tokens) - 64)
        end = min(len(tokens), 65)
        assert made.tokens == scored
        assert made.logprob == pytest.approx(row[end - scored : end].sum(), rel=2e-5)


def test_choices_that_differ_in_their_last_token_are_read_once():
    scorer = Scorer(asked.run_of(), 8, 64)
    requests = [Scored([*range(30), letter], 30) for letter in range(65, 69)]
    (batch,) = scorer._batches(requests)
    assert batch.arrays["real"].sum() == 30 and len(batch.places) == 4


@given(st.lists(st.integers(1, 9), max_size=40))
def test_rows_hold_every_request_once_and_none_over_another(lengths):
    rows = pack(lengths, 9)
    assert sorted(number for row in rows for number, _ in row) == [*range(len(lengths))]
    for row in rows:
        ends = [start + lengths[number] for number, start in row]
        assert [start for _, start in row] == [0, *ends[:-1]] and ends[-1] <= 9
    assert sum(sum(lengths[n] for n, _ in row) <= 4 for row in rows) <= 1


def test_windows_of_a_long_text_score_each_token_once_with_what_fits_before_it():
    texts = Texts(BytesTokenizer(kind="bytes"))
    pieces = texts.windows("abcdefghij", 4)
    assert pieces == [
        Scored([256, *b"abcd"], 1),
        Scored([*b"defgh"], 1),
        Scored([*b"fghij"], 3),
    ]
    assert texts.windows("", 4) == []


def test_white_space_at_the_end_of_a_context_is_scored_with_what_follows():
    texts = Texts(BytesTokenizer(kind="bytes"))
    assert texts.pair("ab \n", "c") == Scored([256, *b"ab \nc"], 3)
    assert texts.pair("", "c") == Scored([256, *b"c"], 1)
    with pytest.raises(DataError, match="'' after 'ab': adds no token"):
        texts.pair("ab", "")


def test_tokens_that_join_a_context_with_what_follows_are_scored_after_the_contexts_own(tmp_path):
    vocab = {name: number for number, name in enumerate(["a", "b", "c", "bc", "ab", "<s>"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("b", "c"), ("a", "b")]))
    made.add_special_tokens(["<s>"])
    made.save(f"{tmp_path}/tokenizer.json")
    texts = Texts(
        HuggingFaceTokenizer(kind="huggingface", path=f"{tmp_path}/tokenizer.json", eos="<s>")
    )
    assert texts.tokenizer.encode(b"abc").tolist() == [0, 3]
    assert texts.pair("ab", "c") == Scored([4, 3], 1)


def test_without_a_token_to_begin_with_an_empty_context_is_refused():
    texts = Texts(BytesTokenizer(kind="bytes", bos=False, eos=False))
    assert texts.pair("ab", "c") == Scored([*b"abc"], 2)
    with pytest.raises(DataError, match="neither BOS nor EOS"):
        texts.pair("", "c")


def test_metrics_are_those_of_their_definitions(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    choice = Question({}, choices=("é", "long"), right=(0,))
    answer = [Likelihood(-2.0, False, 2), Likelihood(-3.0, True, 1)]
    names = ["acc", "acc_norm", "acc_bytes", "acc_tokens", "exact_match"]
    task = one(tmp_path, "multiple_choice", names)
    assert values(task, choice, answer) == {
        "acc": 1.0,  # -2 is more than -3
        "acc_norm": 0.0,  # -2 / 1 character against -3 / 4
        "acc_bytes": 0.0,  # -2 / 2 bytes against -3 / 4
        "acc_tokens": 1.0,  # -2 / 2 tokens against -3 / 1
        "exact_match": 0.0,
    }
    found = results(task, [choice] * 4, [{"acc": 1.0}] * 3 + [{"acc": 0.0}])
    assert found == {
        "acc": 0.75,
        "acc_stderr": pytest.approx(math.sqrt(0.75 / 3) / 2),
        "centered": pytest.approx(0.5),  # of 0.75 where chance is 0.5
    }


def test_standard_errors_of_ratios_are_those_of_the_jackknife(tmp_path):
    rng = np.random.default_rng(0)
    sizes = rng.integers(5, 50, 400)
    sums = -sizes * rng.normal(2.0, 0.3, 400)
    task = one(tmp_path, "loglikelihood_rolling", ["bits_per_byte"])
    items = [{"bits_per_byte": (float(a), int(b))} for a, b in zip(sums, sizes, strict=True)]
    found = results(task, [], items)
    left_out = -(sums.sum() - sums) / (sizes.sum() - sizes) / math.log(2)
    jackknife = math.sqrt(399 / 400 * ((left_out - left_out.mean()) ** 2).sum())
    assert found["bits_per_byte"] == pytest.approx(-sums.sum() / sizes.sum() / math.log(2))
    assert found["bits_per_byte_stderr"] == pytest.approx(jackknife, rel=0.01)


@pytest.fixture
def folder(tmp_path):
    """Task files and their documents."""
    asked.write_tasks(tmp_path)
    return tmp_path


def one(folder, kind, metrics, **fields):
    """A task of a file."""
    fields = {"doc_to_choice": ["a", "b"]} | fields if kind == "multiple_choice" else fields
    files = {"test": f"{folder}/rows.jsonl"}
    (folder / "rows.jsonl").write_text(json.dumps({"a": "x", "b": "y"}) + "\n")
    fields |= {"doc_to_text": "a", "doc_to_target": "b", "dataset_kwargs": {"data_files": files}}
    listed = [{"metric": metric} for metric in metrics]
    path = asked.write_task(folder, "one", output_type=kind, metric_list=listed, **fields)
    return open_tasks([path])[0]


def test_centred_scores_are_put_together_as_core_does():
    found = {
        "a": {"acc": 0.5, "centered": 0.25},
        "b": {"acc": 1.0, "centered": 1.0},
        "g": {"acc": 1.0},
    }
    row = flatten_metrics(found)
    assert row["tasks/centered"] == 0.625 and row["tasks/g/acc"] == 1.0


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        (
            {"doc_to_text": "{{nothing}}"},
            DataError,
            "document 0: 'nothing' is undefined; its fields",
        ),
        (
            {"doc_to_target": "9", "doc_to_choice": ["a"]},
            DataError,
            "right choice is 9, and there are 1",
        ),
        ({"doc_to_choice": "nope"}, DataError, "doc_to_choice: nope is no field"),
        ({"doc_to_choice": "a"}, DataError, "doc_to_choice gives .*, no list of texts"),
        ({"test_split": "dev"}, ConfigError, "test_split: no split dev; its data has test, train"),
        ({"metric_list": [{"metric": "f1"}]}, ConfigError, "f1 is not a metric of .*--lm-eval"),
        ({"process_docs": "x"}, ConfigError, "process_docs"),
        ({"output_type": "multiple_choice", "doc_to_choice": None}, ConfigError, "needs choices"),
        ({"num_fewshot": 9, "fewshot_split": "train"}, DataError, "num_fewshot=9, and there are 5"),
        ({"dataset_kwargs": {"data_files": "no.jsonl"}}, ConfigError, "no.jsonl: no such file"),
    ],
)
def test_a_task_that_cannot_be_asked_says_what_is_wrong(folder, changes, error, says):
    path = asked.write_task(folder, "odd", **{**asked.TASKS["choice"], "num_fewshot": 0, **changes})
    with pytest.raises(error, match=says):
        [task.questions for task in open_tasks([path])]


LACKING = [
    {"doc_to_text": "a"},
    {"doc_to_text": "{{a}} {{b}}"},
    {"doc_to_text": "{{a.upper()}}"},
    {"doc_to_target": "a"},
    {"doc_to_choice": "a"},
    {"doc_to_choice": "{{[a, 'x']}}"},
    {"description": "{{[a]}}"},
]


@pytest.mark.parametrize("changes", LACKING, ids=lambda changes: " ".join(changes.values()))
@pytest.mark.parametrize("line", ["{}", '{"a": null}'], ids=["absent", "null"])
def test_a_field_that_one_document_lacks_is_refused_with_its_place(folder, changes, line):
    task = asked.TASKS["choice"] | {"num_fewshot": 0, "description": "", "doc_to_text": "b"}
    whole = json.dumps({"a": "x", "b": "y", "c": "z", "right": 0})
    bare = json.dumps({"b": "y", "c": "z", "right": 0} | json.loads(line))
    (folder / "test.jsonl").write_text(f"{whole}\n{bare}\n")
    if "{{" not in "".join(changes.values()) and "doc_to_choice" in changes:
        whole = whole.replace('"x"', '["x", "y"]')
        (folder / "test.jsonl").write_text(f"{whole}\n{bare}\n")
    path = asked.write_task(folder, "odd", **{**task, "doc_to_choice": ["x", "y"], **changes})
    (opened,) = open_tasks([path])
    with pytest.raises(DataError, match="task odd, document 1: 'a' is null, or the document lacks"):
        _ = opened.questions


def test_null_may_be_asked_about_in_a_template(folder):
    rows = '{"a": "x", "right": 0}\n{"a": null, "right": 0}\n'
    (folder / "test.jsonl").write_text(rows)
    text = "{{a if a else 'no'}} {{a is none}} {{a == none}}"
    choice = {"output_type": "multiple_choice", "doc_to_choice": ["y"], "doc_to_target": "right"}
    (task,) = open_tasks([asked.write_task(folder, "odd", doc_to_text=text, **choice)])
    asked_for = [question.pairs[0][0] for question in task.questions]
    assert asked_for == ["x False False", "no True True"]


def test_published_tasks_are_found_by_the_names_of_tasks_groups_and_tags(folder):
    (folder / "few").mkdir()
    for name in ("two", "one"):
        text = f"include: ../choice.yaml\ntask: {name}\ntag: [few, more]\n"
        (folder / "few" / f"{name}.yaml").write_text(text)
    text = "group: all\ntask: [some, {task: two, num_fewshot: 1}]\n"
    (folder / "few" / "_all.yaml").write_text(text)
    (folder / "some.yaml").write_text("group: some\ntask:\n  - one\n  - contexts\n")
    (folder / "code.yaml").write_text("task: code\nprocess_docs: !function utils.f\n")

    def names(asked_for):
        return [part.name for part in open_tasks([asked_for], library=str(folder))]

    assert names("one") == ["one"]
    assert names("few") == ["one", "two"]
    assert names("all") == ["one", "contexts", "some", "two", "all"]
    parts = {part.name: part for part in open_tasks(["all"], library=str(folder))}
    assert parts["all"].members == ("one", "contexts", "two")
    assert (parts["two"].cfg.num_fewshot, parts["one"].cfg.num_fewshot) == (1, 2)
    with pytest.raises(
        ConfigError, match="code.yaml:2: tag !function: is code, and none is run; .*--lm-eval"
    ):
        names("code")
    with pytest.raises(ConfigError, match="names no such task, group or tag; or --lm-eval"):
        names("none")


def test_documents_that_are_broken_are_named(folder):
    for content, says in (
        ("[1]", "document 0 is no JSON object"),
        ("{}\n{", "test.jsonl:2: not JSON"),
    ):
        (folder / "test.jsonl").write_text(content)
        with pytest.raises(DataError, match=says):
            open_tasks([f"{folder}/choice.yaml"])
    (folder / "test.jsonl").write_text("")
    with pytest.raises(DataError, match="no document in it"):
        open_tasks([f"{folder}/choice.yaml"])


def test_groups_are_means_by_size_and_may_hold_files_beside_them(folder):
    (folder / "both.yaml").write_text(
        "group: both\ntask: [choice.yaml, contexts.yaml]\naggregate_metric_list: [{metric: acc}]\n"
    )
    run = asked.run_of()
    found, _ = asked.asked(run, [f"{folder}/both.yaml"], limit=4).results(run.init().params)
    assert found["both"]["acc"] == (found["choice"]["acc"] + found["contexts"]["acc"]) / 2
    (folder / "both.yaml").write_text("group: both\ntask: [both.yaml]\n")
    with pytest.raises(ConfigError, match="more than 8 groups inside one another"):
        open_tasks([f"{folder}/both.yaml"])


def test_what_is_scored_must_fit_a_row(folder):
    fields = {"output_type": "loglikelihood", "doc_to_text": "a", "doc_to_target": "{{a[0] * 65}}"}
    path = asked.write_task(folder, "long", **fields)
    with pytest.raises(DataError, match="task long, document 0: [0-9]+ tokens are to be scored"):
        asked.asked(asked.run_of(), [path])


def test_a_group_names_only_metrics_that_its_tasks_have(folder):
    text = "group: g\ntask: [choice.yaml]\naggregate_metric_list: [{metric: accc}]\n"
    (folder / "g.yaml").write_text(text)
    with pytest.raises(ConfigError, match="group g: .*choice has no metric accc; it has acc, acc"):
        asked.asked(asked.run_of(), [f"{folder}/g.yaml"])
    (folder / "g.yaml").write_text("group: g\ntask: []\n")
    with pytest.raises(ConfigError, match="task"):
        open_tasks([f"{folder}/g.yaml"])


def test_two_tasks_of_one_name_are_refused(folder):
    (folder / "more").mkdir()
    other = asked.write_task(folder, "choice", **asked.TASKS["choice"])
    copy = folder / "more" / "choice.yaml"
    copy.write_text((folder / "choice.yaml").read_text() + "task_alias: x\n")
    with pytest.raises(ConfigError, match="two files have this name"):
        open_tasks([other, str(copy)])


def test_generation_needs_room_and_one_process(folder, monkeypatch):
    run = asked.run_of()
    tasks = asked.asked(run, [f"{folder}/generate.yaml"], length=6)
    with pytest.raises(ConfigError, match="max_gen_toks=6: leaves no room"):
        tasks.results(run.init().params)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="for a run of one process"):
        asked.asked(run, [f"{folder}/generate.yaml"])


def test_shipped_questions_have_one_right_answer_at_no_fixed_place():
    tasks = [part for part in open_tasks(["pairs", "cloze"]) if hasattr(part, "questions")]
    assert [len(task.questions) for task in tasks] == [50] * 5
    for task in tasks:
        assert len({question.right for question in task.questions}) > 1
        assert all(len({*question.choices}) == len(question.choices) for question in task.questions)
