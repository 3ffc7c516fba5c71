"""Small tokenizers for tests, by the libraries that write their files; without maxstack."""

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(special=(), pieces=(), merges=()):
    """A tokenizer of bytes, and of further pieces, with the ids in this order."""
    vocab = {piece: i for i, piece in enumerate([*ALPHABET, *pieces])}
    made = _of_bytes(models.BPE(vocab, [*merges]))
    made.add_special_tokens([*special])
    return made


def learn_byte_level(texts, size, special=()):
    """A tokenizer of bytes and of what is frequent in some texts."""
    made = _of_bytes(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=ALPHABET,
        special_tokens=[*special],
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


def _of_bytes(model):
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def of_words(words, unknown="<unk>"):
    """A tokenizer of words between blanks, with the ids in this order."""
    vocab = {word: i for i, word in enumerate(words)}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def learn_pieces(prefix, texts, size, **settings):
    """A model of SentencePiece of at most so many pieces; its path."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(prefix),
        vocab_size=size,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    return f"{prefix}.model"
