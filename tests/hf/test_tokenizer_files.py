"""Exports encode a text, begin and end it as training did."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiers
import tiny
import tokenizers

from maxstack import cli
from maxstack.checkpoint.weights import WeightsWriter
from maxstack.data import vocabulary
from maxstack.data.tokenizers import open_tokenizer
from maxstack.hf.tokenizer import tokenizer_of, unread
from maxstack.models.model import initial, weights_of
from maxstack.schema.data import DataConfig
from maxstack.state import flat

LIBRARY = Path(json.__file__).parents[1]
TEXT = "def main(argv):\n    return 0\n"
KINDS = {
    "bytes": {"kind": "bytes", "eos": True},
    "sentencepiece": {"kind": "sentencepiece"},
    "unigram": {"kind": "sentencepiece"},
    "marked": {"kind": "huggingface", "bos": "<bos>", "eos": "<eos>"},
    "unmarked": {"kind": "huggingface", "eos": "<eos>"},
    "no_bos": {"kind": "sentencepiece", "bos": False},
}


def written(folder, kind):
    """The settings of a tokenizer, its file written: of `unmarked` one that by itself puts <bos>
    before a text."""
    path = folder / ("tokenizer.json" if "marked" in kind else "learnt.model")
    if "marked" in kind:
        made = tokenizers.ByteLevelBPETokenizer()
        special = ["<bos>", "<eos>"]
        made.train([f"{LIBRARY}/json/decoder.py"], vocab_size=300, special_tokens=special)
        if kind == "unmarked":
            made.post_processor = tokenizers.processors.TemplateProcessing(
                "<bos> $A", None, [("<bos>", 0)]
            )
        made.save(str(path))
    elif kind != "bytes":
        source = {"kind": "text", "files": [f"{LIBRARY}/json/*.py"]}
        data = DataConfig.model_validate({"sources": [source]})
        of_kind = "unigram" if kind == "unigram" else "bpe"
        vocabulary.train_vocabulary(data, str(path), vocab=400, model=of_kind)
    return KINDS[kind] | ({} if kind == "bytes" else {"path": str(path)})


@pytest.fixture(params=tiers.of([*KINDS], slow=["unigram", "no_bos"]))
def exported(request, tmp_path):
    """A run whose weights are drawn, its export, and its tokenizer."""
    source = {"kind": "text", "files": [f"{LIBRARY}/json/*.py"]}
    data = {"sources": [source], "tokenizer": written(tmp_path, request.param), "seq_len": 64}
    block = {"mixer": {"kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 8}}
    blocks = {"block": block | {"mlp": {"kind": "gated", "hidden": 64}}}
    model = tiny.model(vocab=400, blocks=blocks, pattern=["block"], layers=1, param_dtype="float32")
    cfg = tiny.config(model=model, data=data)
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    tiny.write(run, cfg).rename(run / "config.yml")
    writer, weights = WeightsWriter(run, weights_of(cfg.model)), flat(initial(cfg.model, 0))
    for path, weight in weights.items():
        writer.fill(path, 0, lambda index, weight=weight: np.asarray(weight)[index] * 8)
    writer.finish()
    assert cli.main(["export", str(run), "--out", str(out)]) == 0
    return run, out, open_tokenizer(cfg.data.tokenizer)


def test_a_run_and_its_export_score_alike_and_end_alike(exported, tmp_path):
    run, out, tokenizer = exported
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    found = []
    for model in (run, out):
        words = ["score", str(model), "--data", str(tmp_path / "texts.jsonl")]
        scores = tmp_path / f"{model.name}.npz"
        more = "model.dtype=float32", "run.compilation_cache=null"
        assert cli.main([*words, "--out", str(scores), *more]) == 0
        found.append(np.load(scores))
    for name in ("tokens", "logprobs"):
        np.testing.assert_allclose(*(each[name] for each in found), rtol=1e-6)
    bos, eos = (ids[0] if ids else None for ids in (tokenizer.bos, tokenizer.eos))
    config = json.loads((out / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (bos, eos)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == eos
    if (out / "tokenizer.json").exists():  # which transformers encodes by
        theirs = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
        ours = [*tokenizer.bos, *tokenizer.without_ends(tokenizer.encode(TEXT.encode()))]
        assert theirs.encode(TEXT).ids == ours
        assert theirs.decode(ours) == TEXT


def test_tokens_added_beside_a_sentencepiece_model_are_no_pieces_of_it(tmp_path):
    """As of dolphin-2.5-mixtral, whose <|im_end|> is EOS, and of Phi-3 without tokenizer.json."""
    path = tmp_path / "tokenizer.model"
    path.write_bytes(Path(written(tmp_path, "sentencepiece")["path"]).read_bytes())
    own = {"added_tokens_decoder": {"2": {"content": "</s>"}}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    assert tokenizer_of(tmp_path)["eos"]
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 400}))
    assert tokenizer_of(tmp_path) is None
    assert "tokens such as '<|im_end|>' are added beside tokenizer.model" in unread(tmp_path)
