"""A SentencePiece model that a run has trained, as the files of a transformers tokenizer.

The merges of a BPE are all ways to cut a piece into two others, in the order of the pieces' scores.
A probe text of all pieces must then give the ids of the model, or no files are made.
"""

import json
from pathlib import Path
from typing import Any

from maxstack.data.gguf.tokenizer import merges_of
from maxstack.data.pieces import SPACE

NAMES = "tokenizer.json", "tokenizer_config.json"


def files_of(path: Path) -> dict[str, Any]:
    """Return the files of NAMES for a BPE model without normalization, as `maxstack data tokenizer`
    trains it; none where they would give other ids than the model at `path`: for a unigram model,
    or one that puts a space before a text."""
    import sentencepiece
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    model: Any = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = range(model.vocab_size())
    pieces = [model.id_to_piece(i) for i in ids]
    special = [i for i in ids if model.is_control(i) or model.is_unknown(i)]
    # A byte is a piece like <0x0A>, which stands for no text of that spelling.
    text = {pieces[i]: i for i in ids if i not in special and not model.is_byte(i)}
    # SentencePiece scores pieces by the order in which it learnt them, the first one highest.
    pairs = merges_of(text, [model.get_score(i) for i in ids])
    unknown = pieces[model.unk_id()]
    made: Any = Tokenizer(
        BPE(
            {piece: i for i, piece in enumerate(pieces)},
            pairs,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # SentencePiece writes spaces as a visible character within pieces.
    made.normalizer = normalizers.Replace(" ", SPACE)
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_tokens([AddedToken("\n", normalized=False)] if "\n" in text else [])
    # Every piece once, and bytes and characters that no piece has.
    probe = "".join(piece.replace(SPACE, " ") for piece in text) + " Grüß\n\t日本  x"
    if made.encode(probe, add_special_tokens=False).ids != model.encode(probe):
        return {}
    # After the probe: SentencePiece reads </s> in a text as characters, transformers as the token.
    made.add_special_tokens([AddedToken(pieces[i], normalized=False) for i in special])
    named = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: pieces[i] for name, i in named.items() if i in special},
        "clean_up_tokenization_spaces": False,
    }
    return dict(zip(NAMES, (json.loads(made.to_str()), config), strict=True))
