"""What rewards and environments read of a sampled answer, and where it ends."""

import json

import numpy as np
import pytest
import tiny
import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from maxstack.data.prompts import Prompt
from maxstack.inference.tools import read_calls
from maxstack.rollouts.generator import Generator
from maxstack.rollouts.sample import Group

SPECIAL = ["<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<think>"]
TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }}<|im_end|>
{% endfor %}{# <tool_call>{"name", "arguments"}</tool_call> #}assistant: """
CALL = '{"name": "add", "arguments": {"a": 1}}'


@pytest.fixture
def folder(tmp_path):
    """A folder whose model ends answers at two tokens, by generation_config.json."""
    made = tokenizers.Tokenizer(
        BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.save(str(tmp_path / "tokenizer.json"))
    ends = {"eos_token_id": [made.token_to_id(token) for token in SPECIAL[:2]]}
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def test_tool_calls_and_special_tokens_are_parsed_as_by_the_server(folder):
    path = str(folder / "tokenizer.json")
    tokenizer = {"kind": "huggingface", "path": path, "eos": "<|im_end|>"}
    rewards = [{"kind": "regex", "pattern": "<think>", "special_tokens": True}]
    run = tiny.make_run(
        tiny.with_rollouts(data={"tokenizer": tokenizer, "template": None}, rewards=rewards)
    )
    generator = Generator(run, 8)
    encode = tokenizers.Tokenizer.from_file(path).encode
    assert generator.stops == {*encode("<|im_end|><|endoftext|>").ids}
    (sample,) = Group.of(Prompt(np.array(encode("add").ids), {}, "rows:1", "0"), 1).samples
    sample.texts.append("")
    answer = f"<think>so<tool_call>{CALL}</tool_call>"
    generator.note_answer(sample, sample.ids, encode(answer).ids)
    assert sample.texts == [answer.removeprefix("<think>")] and sample.spelt == answer
    (call,) = read_calls(generator.form, sample.texts[-1])
    assert (call.name, call.arguments) == ("add", '{"a": 1}')
