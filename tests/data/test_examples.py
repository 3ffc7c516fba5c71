"""Records as rows: what of a conversation, a pair or an answer counts."""

import json

import numpy as np
import pytest
import tokenizers
from json_lines import write_rows
from tokenizer_files import byte_level, of_words
from tokenizers import pre_tokenizers

from maxstack.data.examples import EXTRAS, READ, units_of
from maxstack.data.feed import Feed
from maxstack.data.sources import open_source
from maxstack.errors import ConfigError, DataError
from maxstack.objectives.objective import Field
from maxstack.schema.data import DataConfig

WORDS = "<pad> <eos> <user> <assistant> <end> <think> 0 1 2 3 4 5 6 7 8 9 + = a b c d e f".split()
SPECIAL = ("<eos>", "<user>", "<assistant>", "<end>", "<think>")
PREFIX = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }} <end>{% endgeneration %}{% else %}{{ m.content }} <end>{% endif %} "
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
THINKS = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' and loop.last %}<think> "
    "{% endif %}{{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
SUM = [
    {"role": "user", "content": "1 + 2 ="},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "a b"},
    {"role": "assistant", "content": "b a"},
]
CALLS = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "a", "arguments": "{}"}}],
}
EXTRA = {name: Field("batch seq", "float32") for name in EXTRAS}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tokenizer of words and the chat template PREFIX."""
    folder = tmp_path_factory.mktemp("model")
    made = of_words(WORDS, "<pad>")
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(list(SPECIAL))
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<eos>", "chat_template": PREFIX}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def data(tmp_path, model):
    """Makes the configuration of rows of some records in a file."""

    def made(records, record="chat", folder=model, **settings):
        write_rows(path := f"{tmp_path}/records.jsonl", records)
        if isinstance(settings.get("template"), str) and "{" in settings["template"]:
            template = tmp_path / "template.jinja"
            template.write_text(settings["template"])
            settings["template"] = str(template)
        tokenizer = {"kind": "huggingface", "path": f"{folder}/tokenizer.json", "eos": "<eos>"}
        record = {"kind": record} if isinstance(record, str) else record
        source = {"kind": "jsonl", "files": [path], "record": record}
        fields = {"sources": [source], "tokenizer": tokenizer}
        fields |= {"seq_len": 32, "packing": "none", "shuffle": False}
        return DataConfig.model_validate(fields | settings)

    return made


def rows(cfg, count=1, fields=()):
    """The first rows, each as lists of words of (inputs, counted targets) by segment, and the
    arrays."""
    feed = Feed(cfg, [0], 1, fields={name: EXTRA[name] for name in fields})
    made = []
    for _ in range(count):
        row = {name: array[0] for name, array in next(feed).items()}
        parts = []
        for segment in range(1, row["segments"].max() + 1):
            own = row["segments"] == segment
            counted = own & (row["mask"] > 0)
            parts.append((words(row["tokens"][own]), words(row["targets"][counted])))
        made.append((parts, row))
    feed.close()
    return made


def words(ids):
    return " ".join(WORDS[i] for i in ids)


@pytest.mark.parametrize("template", [PREFIX, MARKED])
@pytest.mark.parametrize(
    ("train", "counted"),
    [("assistant", "3 <end> b a <end>"), ("last", "b a <end>")],
)
def test_answers_of_a_conversation_count(data, template, train, counted):
    record = {"kind": "chat", "train": train}
    cfg = data([{"messages": SUM}], record, template=template)
    (((inputs, targets),), _), *_ = rows(cfg)
    assert inputs == "<user> 1 + 2 = <end> <assistant> 3 <end> <user> a b <end> <assistant> b a"
    assert targets == counted


def test_each_answer_has_a_row_as_the_template_writes_it_there(data):
    record = {"kind": "chat", "train": "each"}
    cfg = data([{"messages": SUM}], record, template=THINKS)
    first, second, again = (parts[0] for parts, _ in rows(cfg, 3))
    assert first == ("<user> 1 + 2 = <end> <assistant> <think> 3", "<think> 3 <end>")
    assert second == (
        "<user> 1 + 2 = <end> <assistant> 3 <end> <user> a b <end> <assistant> <think> b a",
        "<think> b a <end>",
    )
    assert again == first


FILTERED = (
    "{% filter trim %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %} {{ m.content }} <end>  {% endgeneration %}{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}{% endfilter %}"
)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (THINKS, r"records.jsonl: line 1.*set record.train=each"),
        (PREFIX.replace(" <end> ", " "), "ends in '3 ', which is no special token"),
        (FILTERED, "changes what a {% generation %} block wrote"),
    ],
    ids=["earlier turns are written otherwise", "no special token ends a turn", "a filter"],
)
def test_a_template_that_does_not_show_what_counts_is_refused(data, template, says):
    with pytest.raises(DataError, match=says):
        rows(data([{"messages": SUM}], template=template))


def test_what_follows_the_end_of_a_turn_does_not_count(data):
    """White space after the end of a turn is never generated."""
    template = MARKED.replace("<end>{% endgeneration %}", "<end> \n{% endgeneration %}")
    cfg = data([{"messages": SUM}], template=template)
    (((_, targets),), _), *_ = rows(cfg)
    assert targets == "3 <end> b a <end>"


def test_a_completion_has_no_template_and_ends_in_eos(data):
    cfg = data([{"prompt": "1 + 2 =", "completion": " 3"}])
    (((inputs, targets),), _), *_ = rows(cfg)
    assert (inputs, targets) == ("1 + 2 = 3", "3 <eos>")


@pytest.fixture(scope="module")
def spaced(tmp_path_factory):
    """A folder whose tokenizer joins a space to the word after it."""
    folder = tmp_path_factory.mktemp("spaced")
    made = byte_level(["<eos>"], ["no", "\u0120no"], [("n", "o"), ("\u0120", "no")])
    made.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    return folder


ASKED = {"prompt": "Answer: ", "completion": "no"}
SAID = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "no"}]}


@pytest.mark.parametrize("record", [ASKED, SAID])
def test_an_answer_begins_where_the_prompt_ends(data, spaced, record):
    """The joined text has one token for ` no`, whose beginning is the prompt's. As TRL and a model
    that generates have it, the answer is `no`, and counts."""
    row = next(Feed(data([record], folder=spaced), [0], 1))
    made = tokenizers.Tokenizer.from_file(str(spaced / "tokenizer.json"))
    counted = row["targets"][0][row["mask"][0] > 0].tolist()
    assert counted == made.encode("no<eos>").ids
    inputs = row["tokens"][0][row["segments"][0] == 1].tolist()
    assert inputs[-2:] == made.encode(" ").ids + made.encode("no").ids


@pytest.mark.parametrize("record", [ASKED, SAID])
def test_a_token_of_both_prompt_and_answer_is_refused_where_they_are_joined(data, spaced, record):
    cfg = data([record], {"kind": "chat", "joined": True}, spaced)
    with pytest.raises(DataError, match="line 1: record.joined: a token holds the end .*: no"):
        next(Feed(cfg, [0], 1))


@pytest.mark.parametrize(
    ("weights", "counted"),
    [((None, 1), "3 <end> b a <end>"), ((0, None), "b a <end>"), ((1, 0), "3 <end>")],
)
@pytest.mark.parametrize("template", [PREFIX, MARKED])
def test_a_message_of_weight_0_does_not_count(data, weights, counted, template):
    messages = [dict(message) for message in SUM]
    for turn, weight in zip((1, 3), weights, strict=True):
        messages[turn] |= {"weight": weight}
    cfg = data([{"messages": messages}], template=template)
    (((_, targets),), _), *_ = rows(cfg)
    assert targets == counted


def test_a_weight_is_that_of_the_tokens(data):
    messages = [SUM[0], SUM[1] | {"weight": 0.25}, SUM[2], SUM[3]]
    cfg = data([{"messages": messages}])
    ((_, row),) = rows(cfg)
    assert row["mask"][row["mask"] > 0].tolist() == [0.25, 0.25, 1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({1: {"train": False}}, "message 1: train is not read"),
        ({0: {"weight": 1}}, "message 0: weight=1 of a message of the user"),
        ({1: {"weight": -1}}, "message 1: weight=-1"),
        ({1: {"weight": "no"}}, "weight='no': must be a number"),
        ({1: {"weight": 0}, 3: {"weight": 0}}, "all messages of the assistant .* weight 0"),
    ],
)
def test_what_else_says_that_a_message_is_trained_on_is_refused(data, changes, words):
    messages = [message | changes.get(i, {}) for i, message in enumerate(SUM)]
    with pytest.raises(DataError, match=words):
        rows(data([{"messages": messages}]))


def test_a_prompt_that_whole_conversations_repeat_counts_once(data):
    """As HuggingFaceH4/ultrafeedback_binarized has them."""
    asked, said, other = SUM[0], SUM[1], {"role": "assistant", "content": "4"}
    record = {"prompt": "1 + 2 =", "chosen": [asked, said], "rejected": [asked, other]}
    cfg = data([record], "pairs")
    ((parts, _),) = rows(cfg)
    assert parts == [
        ("<user> 1 + 2 = <end> <assistant> 3", "3 <end>"),
        ("<user> 1 + 2 = <end> <assistant> 4", "4 <end>"),
    ]
    record["rejected"] = [SUM[2], other]
    with pytest.raises(DataError, match="rejected: holds a turn of the user that is not the prom"):
        rows(data([record], "pairs"))


PAIR = {"prompt": "1 + 2 =", "chosen": " 3", "rejected": " 4 5"}


@pytest.mark.parametrize(
    "record",
    [
        PAIR,
        {"chosen": "1 + 2 = 3", "rejected": "1 + 2 = 4 5"},
        {"prompt": "1 + 2 =", "completions": [" 4 5", " 6", " 3"], "scores": [0, 1, 2.5]},
    ],
)
def test_a_pair_is_two_segments_of_one_row(data, record):
    cfg = data([record], "pairs")
    (parts, row), *_ = rows(cfg)
    assert parts == [("1 + 2 = 3", "3 <eos>"), ("1 + 2 = 4 5", "4 5 <eos>")]
    assert row["positions"][:11].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]


def test_pairs_of_messages_share_their_prompt(data):
    chosen, rejected = SUM, [*SUM[:3], {"role": "assistant", "content": "a"}]
    cfg = data([{"chosen": chosen, "rejected": rejected}], "pairs")
    (((_, first), (_, second)), _), *_ = rows(cfg)
    assert (first, second) == ("b a <end>", "a <end>")


def test_what_is_known_of_a_pair_lies_beside_its_tokens(data):
    record = PAIR | {"margin": 2, "ref_chosen_logps": -1.5, "ref_rejected_logps": -7}
    cfg = data([record], "pairs")
    _, row = rows(cfg, fields=("margin", "reference"))[0]
    assert row["margin"][:12].tolist() == [2] * 11 + [0]
    assert row["reference"][:12].tolist() == [-1.5] * 5 + [-7] * 6 + [0]


def test_a_sequence_that_is_rated_has_its_last_token_among_the_inputs(data):
    cfg = data([PAIR], "pairs")
    ((first, _), (second, _)), row = rows(cfg, fields=("ends",))[0]
    assert (first, second) == ("1 + 2 = 3 <eos>", "1 + 2 = 4 5 <eos>")
    assert np.flatnonzero(row["ends"]).tolist() == [5, 12]
    assert (row["mask"] == row["ends"]).all()


def test_a_labelled_answer_is_followed_by_another_to_its_prompt(data):
    prompts = ["1 +", "1 +", "a"]
    records = [
        {"prompt": prompt, "completion": f" {i}", "label": i == 1}
        for i, prompt in enumerate(prompts)
    ]
    cfg = data(records, "labelled")
    made = rows(cfg, 2, fields=("label", "mismatched"))
    assert [parts for parts, _ in made] == [
        [("1 + 0", "0 <eos>"), ("1 + 2", "2 <eos>")],
        [("1 + 1", "1 <eos>"), ("1 + 2", "2 <eos>")],
    ]
    assert [row["label"][0] for _, row in made] == [-1, 1]
    assert made[0][1]["mismatched"][:7].tolist() == [0, 0, 0, 1, 1, 1, 0]
    assert made[0][1]["label"][3] == 0
    plain, _ = rows(cfg, fields=("label",))[0]
    assert len(plain) == 1


def test_of_a_prompt_nothing_counts(data):
    cfg = data([{"prompt": "1 + 2 ="}], "prompts")
    assert rows(cfg)[0][0] == [("1 + 2", "")]


@pytest.mark.parametrize(
    ("overlong", "kept"),
    [("drop", ["a a a"]), ("cut", ["a a a a a a a a", "a a a"])],
)
def test_what_is_too_long_is_counted_and_told(data, overlong, kept):
    records = [{"prompt": "a a", "completion": " a" * size} for size in (20, 1)]
    cfg = data(records, overlong=overlong, seq_len=8)
    feed = Feed(cfg, [0], 1)
    seen = [words(next(feed)["tokens"][0]).replace(" <pad>", "") for _ in range(len(kept))]
    assert seen == kept
    (line,) = feed.skipped()
    assert line.startswith(f"data.overlong={overlong}: 1 records of jsonl-0 so far are longer than")
    assert line.endswith("records.jsonl: line 1: 23 tokens")
    lines = []
    for _ in range(40):
        next(feed)
        lines += feed.skipped()
    assert [line.split(": ")[1][:10] for line in lines] == ["10 records"]
    feed.close()


@pytest.mark.parametrize(
    ("kind", "record", "fields", "tokens"),
    [
        ("chat", {"prompt": "a a", "completion": " a" * 20}, (), 23),
        ("pairs", PAIR, (), 13),
        ("pairs", PAIR, ("ends",), 13),
    ],
)
def test_a_record_that_is_too_long_ends_the_run_unless_it_is_allowed(
    data, kind, record, fields, tokens
):
    cfg = data([record], kind, seq_len=8, quarantine=5)
    said = f"line 1: {tokens} tokens, but data.seq_len=8; raise it, or set"
    with pytest.raises(DataError, match=said):
        rows(cfg, fields=fields)


def test_a_pair_that_is_cut_keeps_something_of_both(data):
    records = [{"prompt": "a", "chosen": " b" * 20, "rejected": " c c"}]
    cfg = data(records, "pairs", seq_len=12, overlong="cut")
    parts, _ = rows(cfg)[0]
    assert [len(inputs.split()) for inputs, _ in parts] == [9, 3]


def test_units_are_packed_whole_and_resumed_in_the_middle_of_a_record(data):
    records = [{"messages": SUM}, {"messages": SUM[:2]}]
    record = {"kind": "chat", "train": "each"}
    cfg = data(records, record, packing="fit", template=THINKS, seq_len=27)
    feed = Feed(cfg, [0], 1)
    seen, states = [], [feed.state()]
    for _ in range(5):
        seen.append(next(feed)["tokens"])
        states.append(feed.state())
    assert any(state[0, -1] for state in states)
    for number, state in enumerate(states[:-1]):
        feed.restore(state)
        assert (next(feed)["tokens"] == seen[number]).all()
    feed.close()


@pytest.mark.parametrize(
    ("record", "kind", "error"),
    [
        ({"text": "a"}, "chat", "no messages, conversations, or prompt and completion in it; it"),
        ({"messages": []}, "chat", "messages: is a list; must be a list of messages"),
        ({"messages": [{"content": "a"}]}, "chat", r"messages\[0\]: has no role"),
        ({"messages": SUM[:1]}, "chat", "no message of the assistant"),
        ({"conversations": [{"from": "x", "value": "a"}]}, "chat", r"conversations\[0\].from='x'"),
        ({"conversations": [{"from": "gpt", "value": None}]}, "chat", "content is empty"),
        ({"prompt": "a", "chosen": " b"}, "pairs", "no chosen and rejected"),
        ({"chosen": "a", "rejected": "b"}, "pairs", "share no prompt"),
        ({"prompt": "a", "completions": [" b"], "scores": [1]}, "pairs", "1 completions and 1"),
        ({"prompt": "a", "completions": [" b", "c"], "scores": [1, 1]}, "pairs", "have one score"),
        ({"prompt": "a", "completion": " b", "label": "yes"}, "labelled", "label='yes': must be"),
        ({"completion": "a"}, "chat", "no prompt in it"),
        ({"prompt": "a", "completion": [CALLS]}, "chat", "leaves out arguments of a call of mess"),
        ({"prompt": [CALLS, SUM[0]]}, "prompts", "leaves out arguments of a call of message 0"),
    ],
)
def test_records_of_another_form_are_refused_by_line(data, record, kind, error):
    cfg = data([record], {"kind": kind})
    with pytest.raises(DataError, match=f"records.jsonl: line 1: .*{error}"):
        rows(cfg)


KINDS = {
    "chat": (
        ("teacher_tokens", "teacher_logps"),
        {"prompt": "1 +", "completion": " 2", "top_tokens": [[0]] * 4, "top_logprobs": [[0]] * 4},
        {"messages": SUM},
        {"conversations": SUM},
    ),
    "labelled": (
        ("label", "reference"),
        {"prompt": "1 +", "completion": " 2", "label": True, "ref_logps": -1},
        {"messages": SUM, "label": True, "ref_logps": -1},
        {"conversations": SUM, "label": True, "ref_logps": -1},
    ),
    "pairs": (
        ("margin", "reference"),
        PAIR | {"margin": 1, "ref_chosen_logps": -1, "ref_rejected_logps": -1},
        PAIR | {"completions": ["a", "b"], "scores": [1, 2]},
        {"prompt": SUM[:1], "chosen": "3", "rejected": "4"},
    ),
}
"""Extras, and records that between them have all keys that a kind may have."""


@pytest.mark.parametrize("kind", READ)
def test_keys_that_are_said_to_be_read_are_those_that_change_what_is_read(data, kind):
    extras, *records = KINDS[kind]
    fields = {name: Field("batch seq", "float32", (1,) * ("teacher" in name)) for name in extras}

    def read(record):
        cfg = data([record], kind)
        try:
            units = units_of(open_source(cfg.sources[0], split="all"), 0, cfg, fields)
        except DataError as error:
            return str(error).partition("it has")[0]
        return str(units)

    found = {
        key
        for key in set.union(*READ.values())
        for record in records
        if read(record | {key: 5}) != read(record)
    }
    assert found == READ[kind]


def test_bytes_have_the_template_that_is_named(data):
    cfg = data([{"messages": SUM[:2]}], template="plain")
    cfg = DataConfig.model_validate(cfg.model_dump() | {"tokenizer": {"kind": "bytes"}})
    feed = Feed(cfg, [0], 1)
    row = {name: array[0] for name, array in next(feed).items()}
    feed.close()
    assert row["tokens"][:10].tolist() == [256, *b"1 + 2 =\n3"]
    assert row["targets"][row["mask"] > 0].tolist() == [*b"3", 256]
    nameless = DataConfig.model_validate(cfg.model_dump() | {"template": None})
    with pytest.raises((ConfigError, DataError), match="data.template: a tokenizer of kind bytes"):
        next(Feed(nameless, [0], 1))
