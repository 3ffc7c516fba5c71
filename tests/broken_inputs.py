"""Parsers of what comes from outside, each with valid inputs and with what breaks these."""

import functools
import gzip
import io
import json
import multiprocessing
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import packaged
import safetensors.numpy
import zstandard
from hypothesis import strategies as st
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from maxstack import load, strict_json
from maxstack.cluster import roll_call
from maxstack.config import compose, reader
from maxstack.data import conversations, copies, images, tokenizers
from maxstack.data.files import File
from maxstack.errors import DataError
from maxstack.hf.adapter import Adapter
from maxstack.hf.contents import Contents
from maxstack.hf.safetensors_file import SafetensorsFile
from maxstack.inference.packages import message
from maxstack.inference.server import schemas
from maxstack.package.loader import Package
from maxstack.report import goodput, history
from maxstack.schema.data import HuggingFaceTokenizer

GOLDENS = Path(__file__).parent / "goldens"
BODIES = schemas.ChatBody, schemas.CompletionBody, schemas.TokenizeBody, schemas.EmbeddingBody
VALUES = (
    *("null", "true", "-1", "0", "1.5", "1e308", "1e999", "-0", "NaN", '""', "[]", "{}", "[[]]"),
    *("1" + "0" * power for power in (9, 18, 30, 99, 400, 5000)),
    *('"\\ud800"', '"\\u0000"', '"../../x"', '"/dev/zero"', '"http://h/x"', '"{{ x }}"', '"1"'),
    *("[" * depth + "]" * depth for depth in (50, 200, 3000)),
    *('{"a":' * depth + "1" + "}" * depth for depth in (50, 200, 3000)),
    *('"' + "a" * 100_000 + '"', "[" + "0," * 5000 + "0]", '{"a": 1, "a": 2}', '{"": {}}'),
)
"""JSON texts that stand in the place of a value."""
PIECES = b'[]{}",:\\\0\n\r\t -+.eE0919&*!|>%@`#\xff\xfe\xef\xbb\xbf\xc3\x80'
NUMBER = re.compile(rb"\d+")


ADAPTER = GOLDENS / "adapters" / "lora-llama"


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@functools.cache
def seeds(target: str) -> list[bytes]:
    """Valid inputs of a target."""
    return SEEDS[target]()


def requests() -> list[bytes]:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "b"},
    ]
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    chat = {"model": "m", "messages": messages, "tools": [tool], "response_format": schema}
    sampled = {"temperature": 0.5, "logit_bias": {"5": 1.5}, "stop": ["a"], "seed": 3, "n": 2}
    prompts = {"prompt": ["a", "b"], "guided_json": '{"type": "object"}', "stream": True}
    return [_json(chat | sampled), _json(prompts | sampled), _json({"input": [[1, 2], [3]]})]


def _tokenizer_files() -> list[bytes]:
    made = []
    for model, pre, decoder in (
        (
            models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], byte_fallback=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        ),
        (
            models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], 0, False),
            pre_tokenizers.Metaspace(),
            decoders.Metaspace(),
        ),
        (models.WordLevel({"a": 0, "b": 1}, "a"), pre_tokenizers.Whitespace(), decoders.Fuse()),
    ):
        tokenizer: Any = Tokenizer(model)
        tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoder
        tokenizer.add_special_tokens([AddedToken("<s>", normalized=False)])
        made.append(tokenizer.to_str().encode())
    return made


def _packages(folder: Path) -> list[bytes]:
    return [(packaged.make(folder) / "manifest.json").read_bytes()]


def _pictures() -> list[bytes]:
    made = []
    for form in ("PNG", "GIF", "JPEG", "WEBP", "TIFF", "BMP", "PPM"):
        Image.new("RGB", (16, 16)).save(file := io.BytesIO(), form)
        made.append(file.getvalue())
    return made


def _records() -> list[bytes]:
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'}
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 1}]
    return [_json({"conversations": [*turns, call], "tools": "[]"}), _json({"messages": said})]


MESSAGE = {
    "id": "1",
    "inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2.5]}],
    "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
}
SPEC = {"inputs": {"x": {"dtype": "float32", "shape": ["batch", 2]}}, "outputs": {"y": {}}}
CARD = {"process": 1, "processes": 2, "host": "h", "alike": {"packages": {"jax": "1"}}}
TENSORS = safetensors.numpy.save({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.int8)})
ROW = {"step": 3, "loss": None, "not_finite": {"loss": "nan"}, "seconds": 1.5, "skipped": 1}
EVENT = {"event": "steps", "time": 5.0, "steps": [1, 2], "stepping": 1.5, "seconds": {"save": 1}}
SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "request": requests,
    "message": lambda: [_json(MESSAGE)],
    "json": lambda: [_json(VALUES), *requests()],
    "yaml": lambda: [b"a: &x [1, 2.5, 'b']\nc: {d: *x, e: null}\nf: |\n  text\n"],
    "configuration": lambda: [b"extends: quickstart\nmodel: {layers: 2, vocab: 512}\ntrain: {}\n"],
    "safetensors": lambda: [TENSORS],
    "tokenizer": _tokenizer_files,
    "model": lambda: [
        (GOLDENS / name / "config.json").read_bytes()
        for name in ("llama", "gemma3", "qwen3", "deepseek_v3", "gpt2", "llama4")
    ],
    "adapter": lambda: [(ADAPTER / "adapter_config.json").read_bytes()],
    "picture": _pictures,
    "record": _records,
    "compressed": lambda: [gzip.compress(b"a" * 999), zstandard.compress(b"a" * 999)],
    "roll call": lambda: [_json(CARD)],
    "rows": lambda: [_json(ROW) + b"\n" + _json(ROW | {"step": 4}) + b"\n", _json(EVENT) + b"\n"],
}


def _write(folder: Path, name: str, data: bytes) -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def _requested(data: bytes, folder: Path) -> None:
    refused = []
    for kind in BODIES:
        try:
            schemas.parse_body(kind, data)
        except schemas.Refusal as error:
            refused.append(error)
    if len(refused) == len(BODIES):
        raise refused[0]


def _tokenized(data: bytes, folder: Path) -> None:
    path = str(_write(folder, "tokenizer.json", data))
    cfg = HuggingFaceTokenizer(kind="huggingface", path=path)
    tokenizer = tokenizers.HuggingFace(path).with_ends(cfg)
    ids = tokenizer.encode(b"a b <s> abab \xc3\xa9")
    tokenizer.decode(ids)
    tokenizer.spans(b"ab a")
    tokenizer.encode_marked("a<s>b")


def _modelled(data: bytes, folder: Path) -> None:
    _write(folder, "config.json", data)
    Contents(folder, weights=False)


def _adapted(data: bytes, folder: Path) -> None:
    _write(folder, "adapter_config.json", data)
    name = "adapter_model.safetensors"
    _write(folder, name, (ADAPTER / name).read_bytes())
    Adapter(folder)


def _charted(data: bytes, folder: Path) -> None:
    _write(folder, history.FILE, data)
    history.History(folder).update()
    goodput.Account().read_file(folder / history.FILE)


def _opened(data: bytes, folder: Path) -> None:
    file = SafetensorsFile(_write(folder, "model.safetensors", data))
    for name in file.entries:
        file.array(name).sum()


def _package(data: bytes, folder: Path) -> None:
    _write(folder, "manifest.json", data)
    Package(folder)


def _conversation(data: bytes, folder: Path) -> None:
    value = strict_json.parse(data, strict=False)
    conversations.read_example(value if isinstance(value, dict) else {})


def _configuration(data: bytes, folder: Path) -> None:
    load.load_alone(str(_write(folder, "run.yml", data)))


def _called(data: bytes, folder: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        theirs.send_bytes(data[: 1 << 16])
        try:
            roll_call.Card.read(roll_call._read(ours, 1.0))
        except (OSError, ValueError) as error:  # by which process 0 closes the connection
            raise DataError(str(error)) from error


def _decompressed(data: bytes, folder: Path) -> None:
    copies.read_file(File(str(_write(folder, "a.txt.gz", data)), "a"))


PARSERS: dict[str, Callable[[bytes, Path], object]] = {
    "request": _requested,
    "message": lambda data, folder: message.read(data, None, "m", SPEC),
    "json": lambda data, folder: strict_json.parse(data, "it"),
    "yaml": lambda data, folder: compose.plain(reader.read_yaml(data.decode("latin-1"), "a.yml")),
    "configuration": _configuration,
    "safetensors": _opened,
    "tokenizer": _tokenized,
    "model": _modelled,
    "adapter": _adapted,
    "picture": lambda data, folder: images.decode_image(data, 3),
    "record": _conversation,
    "compressed": _decompressed,
    "roll call": _called,
    "rows": _charted,
    "package": _package,
}


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside of one."""
    inner = [*enumerate(value)] if isinstance(value, list) else []
    inner = [*value.items()] if isinstance(value, dict) else inner
    below = [place for key, each in inner for place in _places(each, (*path, key))]
    return [*((*path, key) for key, _ in inner), *below]


@st.composite
def _wrong_values(draw: Any, text: bytes) -> bytes:
    """A JSON text with some values that are others, twice, or not there."""
    tree = json.loads(text)
    for _ in range(draw(st.integers(1, 3))):
        if not (places := _places(tree)):
            break
        *above, key = draw(st.sampled_from(places))
        parent = tree
        for each in above:
            parent = parent[each]
        match draw(st.sampled_from(("other", "other", "other", "absent", "renamed"))):
            case "other":
                parent[key] = f"@{draw(st.integers(0, len(VALUES) - 1))}@"
            case "absent":
                del parent[key]
            case "renamed" if isinstance(parent, dict):
                parent[draw(st.sampled_from(("", "type", "\ud800", "a" * 2000)))] = parent.pop(key)
    marked = json.dumps(tree)
    return re.sub(r'"@(\d+)@"', lambda found: VALUES[int(found[1])], marked).encode()


@st.composite
def _wrong_bytes(draw: Any, data: bytes) -> bytes:
    """Bytes of which some are others, more, or not there."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        stop = start + draw(st.sampled_from((0, 1, 2, 8, 64)))
        times = draw(st.sampled_from((1, 1, 1, 3, 50, 5000)))
        match draw(st.sampled_from(("cut", "flip", "repeat", "insert", "number"))):
            case "cut":
                data = data[:start] + data[stop:]
            case "flip":
                changed = bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in data[start:stop])
                data = data[:start] + changed + data[stop:]
            case "repeat":
                data = data[:start] + data[start:stop] * times + data[stop:]
            case "insert":
                piece = draw(st.integers(0, len(PIECES) - 1))
                data = data[:start] + PIECES[piece : piece + 1] * times + data[start:]
            case "number":
                number = draw(st.sampled_from(("-1", "0", "9" * 9, "9" * 18, "9" * 20, "9" * 5000)))
                rest = NUMBER.sub(number.encode(), data[start:], count=1)
                data = data[:start] + rest
    return data[: 1 << 20]


@st.composite
def broken(draw: Any, valid: Sequence[bytes]) -> bytes:
    """A valid input with some of it broken."""
    data = draw(st.sampled_from(valid))
    is_json = data[:1] in (b"{", b"[") and data.count(b"\n") < 2
    if is_json and draw(st.booleans()):
        data = draw(_wrong_values(data))
        return data if draw(st.integers(0, 3)) else draw(_wrong_bytes(data))
    return draw(_wrong_bytes(data))
