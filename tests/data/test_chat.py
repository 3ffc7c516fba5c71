import json
import sys

import pytest
import tiers
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from maxstack.data import chat, jinja, vocabulary
from maxstack.data.chat import ChatTemplate, encode_chat, read_chat_template, to_template_messages
from maxstack.data.tokenizers import open_tokenizer
from maxstack.errors import ConfigError, DataError
from maxstack.schema.data import BytesTokenizer, DataConfig, HuggingFaceTokenizer

HELLO = [{"role": "user", "content": "Grüß <b>Gott</b>"}]
SIMPLE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
)


def rendered(source, messages=HELLO, **settings):
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}, "here").render(
        messages, **settings
    )


def write(folder, name, value):
    folder.mkdir(exist_ok=True)
    text = value if isinstance(value, str) else json.dumps(value)
    (folder / name).write_text(text, encoding="utf-8")


def test_blocks_leave_no_blank_lines():
    source = "{% for m in messages %}\n {% if m %}\n{{ m.role }}\n {% endif %}\n{% endfor %}\nend"
    assert rendered(source) == "user\nend"


def test_json_is_written_as_it_is():
    tool = {"name": "f", "text": "é <b> 'x'"}
    assert rendered("{{ tools[0] | tojson }}", tools=[tool]) == json.dumps(tool, ensure_ascii=False)
    assert rendered("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == json.dumps(
        {"a": 2, "b": 1}, indent=1
    )


def test_generation_blocks_are_text_with_variables_of_their_own():
    source = (
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
        "{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}{% endgeneration %}"
        "{% break %}{% endfor %}"
    )
    assert rendered(source) == "211user"


def test_without_jinja2_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    jinja._environment.cache_clear()
    with pytest.raises(ConfigError, match="pip install jinja2"):
        rendered("text")


COSTLY = {
    "doubles": "{% set a = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set a.x = a.x + a.x %}{% endfor %}",
    "pads": "{{ 'a' | center(3000000000) }}",
    "format": "{{ '%2999999999d' % 1 }}",
    "join": "{{ range(99999) | join('a'.ljust(1000000)) }}",
    "takes long": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("cost", tiers.of(COSTLY, *[*COSTLY][:-1]))
def test_a_guarded_template_ends_its_own_process_and_the_next_conversation_is_rendered(cost):
    source = "{% if messages[0].content == 'attack' %}" + COSTLY[cost] + "{% endif %}ok"
    template = ChatTemplate({"default": source}, {}, "here", guarded=True)
    with pytest.raises(
        DataError, match="template: a conversation .* (of memory|of processor time)"
    ):
        template.render([{"role": "user", "content": "attack"}])
    assert template.render(HELLO) == "ok"


def test_a_guarded_template_runs_nothing_of_the_working_folder(tmp_path, monkeypatch):
    for name in ("jinja2", "json", "select", "maxstack"):
        write(tmp_path, f"{name}.py", "open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert ChatTemplate({"default": SIMPLE}, {}, "here", guarded=True).render(HELLO)
    assert not (tmp_path / "ran").exists()


def test_a_guarded_template_writes_the_same_text_and_tells_the_same_error():
    wrong = "{{ messages[0].content }}\n{{ raise_exception('no') }}"

    def told(source, messages, guarded):
        try:
            template = ChatTemplate({"default": source}, {"bos_token": "\ud800"}, "here", guarded)
            return template.render(messages)
        except DataError as error:
            return str(error)

    for source, messages in (
        (SIMPLE, HELLO),
        (SIMPLE, HELLO * 9999),
        (wrong, HELLO),
        ("{% if", HELLO),
    ):
        assert told(source, messages, False) == told(source, messages, True)


@pytest.mark.parametrize(
    "source, words",
    [
        ("{{ messages.__class__.__mro__ }}", "__class__"),
        ("{{ ''['__class__'].mro }}", "__class__"),
        ("{{ ('' | attr('__class__')).x }}", "__class__"),
        ("{{ '{0.__class__.__name__}'.format(messages) }}", "__class__"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for i in range(10**9) %}{% endfor %}", "range"),
        ("{{ messages.append(1) }}", "append"),
        ("{% for i in range(99) %}{{ 'x' * 1000000 }}{% endfor %}", "more than"),
        ("{{ 'a' * 3 * 10**9 }}", "makes a value that is too large"),
        ("{{ 9**9999**9999 }}", "makes a value that is too large"),
        ("{{ 7 * [1] * 10**9 }}", "makes a value that is too large"),
        ("{{ messages.missing.deeper }}", "missing"),
        ("{{ raise_exception", "line 1"),
        ("{% include '/etc/passwd' %}", "loader"),
    ],
)
def test_what_the_sandbox_refuses_or_a_template_raises_is_an_error(source, words):
    with pytest.raises(DataError, match=f"here: the chat template:.*{words}"):
        rendered(source)


@pytest.mark.parametrize("own", ["", "hf"])
@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json", "config"])
def test_the_template_of_a_folder_gets_its_special_tokens(tmp_path, own, name):
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    if name == "config":
        config["chat_template"] = SIMPLE
    else:
        write(tmp_path / own, name, SIMPLE if "jinja" in name else {"chat_template": SIMPLE})
    write(tmp_path / own, "tokenizer_config.json", config)
    assert read_chat_template(tmp_path).render(HELLO) == "<s>user: Grüß <b>Gott</b></s>"


def test_a_sentencepiece_model_alone_names_its_special_tokens(tmp_path):
    write(tmp_path, "a.txt", "some text to learn from " * 20)
    learnt = {"kind": "sentencepiece", "path": str(tmp_path / "tokenizer.model")}
    data = DataConfig(sources=[{"kind": "text", "files": [f"{tmp_path}/a.txt"]}], tokenizer=learnt)
    vocabulary.train_vocabulary(data, learnt["path"], vocab=280, most=True)
    write(tmp_path, "my.jinja", SIMPLE)
    template = chat.open_template(data.model_copy(update={"template": f"{tmp_path}/my.jinja"}))
    assert template.render(HELLO) == "<s>user: Grüß <b>Gott</b></s>"


@pytest.mark.parametrize("written", ["in a list", "as files"])
def test_conversations_with_tools_use_the_template_for_them(tmp_path, written):
    """In files as transformers' save_pretrained writes them."""
    if written == "as files":
        write(tmp_path, "chat_template.jinja", "plain")
        write(tmp_path / "additional_chat_templates", "tool_use.jinja", "tools")
    else:
        named = {"default": "plain", "tool_use": "tools"}
        listed = [{"name": name, "template": text} for name, text in named.items()]
        write(tmp_path, "tokenizer_config.json", {"chat_template": listed})
    template = read_chat_template(tmp_path)
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[{"name": "f"}]) == "tools"


@pytest.mark.parametrize(
    "written",
    [
        "{{ call.function.name + ' ' + call.function.arguments }}",
        "{{ call.function.name }} {{ call.function.arguments | tojson }}",
        "{{ call.function.name }} {% if call.function.arguments is string %}no"
        "{% else %}{{ call.function.arguments | tojson }}{% endif %}",
    ],
    ids=["DeepSeek V3", "Hermes", "Qwen3"],
)
def test_arguments_of_calls_reach_a_template_in_the_form_that_it_takes(tmp_path, written):
    calls = "{% for call in message.tool_calls %}" + written + "{% endfor %}"
    source = "{% for message in messages %}" + calls + "{% endfor %}"
    write(tmp_path, "tokenizer_config.json", {"chat_template": source})
    call = {"function": {"name": "add", "arguments": {"a": "ä"}}}
    said = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert read_chat_template(tmp_path).render(said) == 'add {"a": "ä"}'


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_a_thought_reaches_templates_by_any_of_its_names(name):
    (made,) = chat.to_template_messages([{"role": "assistant", "content": "b", name: "a"}])
    assert (made["reasoning_content"], made["thinking"]) == ("a", "a")
    (both,) = chat.to_template_messages([{"reasoning_content": "a", "thinking": "b"}])
    assert (both["reasoning_content"], both["thinking"]) == ("a", "b")


def test_a_tokenizers_template_comes_before_a_processors(tmp_path):
    """Of which AutoTokenizer reads the first alone."""
    write(tmp_path, "tokenizer_config.json", {"chat_template": "tokenizer"})
    write(tmp_path, "chat_template.json", {"chat_template": "processor"})
    assert read_chat_template(tmp_path).render(HELLO) == "tokenizer"


@pytest.mark.parametrize(
    "config, error, words",
    [
        ({}, ConfigError, "--chat-template FILE.*/v1/completions"),
        ({"chat_template": 3}, DataError, "chat_template=3"),
        ({"chat_template": [{"name": "default"}]}, DataError, "name and template"),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, ConfigError, "'rag'.*default"),
        ({"chat_template": "\n{% x"}, DataError, "line 2"),
    ],
)
def test_a_folder_without_a_usable_template_is_an_error(tmp_path, config, error, words):
    write(tmp_path, "tokenizer_config.json", config)
    with pytest.raises(error, match=words):
        read_chat_template(tmp_path)


def test_a_template_file_that_is_missing_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match="gone.jinja"):
        read_chat_template(tmp_path, str(tmp_path / "gone.jinja"))


def test_special_tokens_of_a_rendered_text_are_ids_and_no_bos_is_added(tmp_path):
    made = tokenizers.Tokenizer(models.BPE({"h": 0, "i": 1, "<": 2, "s": 3, ">": 4}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 5)])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(
        HuggingFaceTokenizer(kind="huggingface", path=str(tmp_path / "tokenizer.json"), bos="<s>")
    )
    assert encode_chat(tokenizer, "<s>hi<s>")[0].tolist() == [5, 0, 1, 5]
    assert tokenizer.encode(b"<s>hi").tolist() == [5, 2, 3, 4, 0, 1]


def test_half_a_pair_of_surrogates_is_an_error():
    with pytest.raises(DataError, match="Unicode.*surrogates"):
        encode_chat(open_tokenizer(BytesTokenizer(kind="bytes")), "a\ud83d")


def call(arguments):
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}


PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}],
}
TAKES_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text | trim }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def test_messages_of_the_api_become_those_of_templates():
    messages = to_template_messages([PARTS, call('{"x": [1]}'), *HELLO])
    assert messages == [PARTS, call({"x": [1]}), *HELLO]


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (TAKES_PARTS, "<user>ab"),  # as transformers renders it, which gives any template the list
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "<user> a \nb"),
        (
            "{% for m in messages %}<{{ m.role }}>{{ m.content + '!' }}{% endfor %}",
            "<user> a \nb!",
        ),
    ],
)
def test_parts_of_text_reach_a_template_that_takes_them(source, written):
    assert rendered(source, to_template_messages([PARTS]), add_generation_prompt=False) == written


@pytest.mark.parametrize(
    "message, words",
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, r"messages\[0\].*'image_url'"),
        (call("{x"), r"messages\[0\].tool_calls: arguments of 'f': not JSON"),
        (call("[]"), r"messages\[0\].tool_calls: arguments of 'f': are no JSON object"),
    ],
)
def test_messages_that_templates_cannot_take_are_errors(message, words):
    with pytest.raises(DataError, match=words):
        to_template_messages([message])
