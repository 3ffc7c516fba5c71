"""A folder for every model family of goldens.yml: a tiny random transformers model, its logits and
gradient on a few documents, and its greedy continuations of a few prompts.

A folder holds config.json and model.safetensors as transformers writes them, and golden.npz:
`tokens` int32 [B, T] padded on the right, `lengths` int32 [B], `logits` float32 [B, T, V] (zero at
padding) and `embed_grad` float32 [V, D], the gradient of the mean negative log-likelihood of all
next tokens with respect to the embedding table (the head's share included where it is tied).

greedy.npz holds what transformers' generate gives with its cache in float32, each prompt alone and
unpadded: `prompts` int32 [B, T] padded on the right with -1, `lengths` int32 [B], `tokens` int32
[B, G], of which none ends a continuation (the end of text is a token like others), and `logprobs`
float32 [B, G] of these tokens, by log_softmax of the model's logits. With LongRoPE the prompts are
beyond the original length, and `short_prompts`, `short_lengths`, `short_tokens` and
`short_logprobs` stay within it, since transformers' Phi3 computes all cached keys anew with the
long factors where it is crossed. That length is the file's `original` (int32).
"""

import itertools
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_goldens import TABLE

CLOSE = 1e-4
"""Share of the deviation by which another CPU's results may differ; up to 3.4e-5 were measured."""
VOCAB = 128
LENGTHS = (28, 13)
"""One document beyond every window, chunk and original RoPE length of goldens.yml, and one within
the original RoPE length."""
CLEAR = 2e-3
"""Least lead of the best logit of every position, in standard deviations of the logits, so that
rounding cannot change the argmax."""
TRIES = 64
"""Random prompts of a length; the one with the most varied clear continuation is kept."""
CLEAR_STEP = 4e-3
"""The same lead for every step of a continuation. No lead that decides between the prompts is
within 5e-5 of it, so that rounding cannot change the choice."""


NAMES = [*TABLE["families"]]
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def make(family: str, out: Path) -> None:
    """Write the family's folder."""
    settings = dict(TABLE["families"][family])
    name = settings.pop("class")
    seed = zlib.crc32(family.encode())
    torch.manual_seed(seed)
    has_text_part = hasattr(transformers, f"{name}TextConfig")
    if name != "GPT2":
        settings = TABLE["dims"] | settings
    config = getattr(transformers, f"{name}{'Text' if has_text_part else ''}Config")(**settings)
    model = (
        transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        )
        .float()
        .eval()
    )
    perturb(model)
    real = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    for attempt in itertools.count(seed):
        tokens = np.where(
            real, np.random.default_rng(attempt).integers(3, VOCAB, real.shape), 0
        ).astype(np.int32)
        logits, grad = evaluate(model, tokens)
        best = np.sort(logits[real], axis=-1)
        if (best[:, -1] - best[:, -2]).min() > CLEAR * logits[real].std():
            break
        model.zero_grad()
    folder = out / family
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(
        folder / "golden.npz",
        tokens=tokens,
        lengths=np.array(LENGTHS, np.int32),
        logits=logits,
        embed_grad=grad,
    )
    np.savez_compressed(folder / "greedy.npz", **continuations(folder, seed))


def perturb(model: Any) -> None:
    """Add noise to every parameter and saved buffer: norms at one, biases at zero and weights too
    small to matter hide mistakes.

    Larger weights would make the deep models chaotic: rounding alone would move their logits by
    more than the tolerance of parity.
    """
    of_tokens = hasattr(model, "get_input_embeddings")
    embed = getattr(model.get_input_embeddings(), "weight", None) if of_tokens else None
    with torch.no_grad():
        for name, tensor in {
            **dict(model.named_parameters()),
            **{n: b for n, b in model.named_buffers() if n in model.state_dict()},
        }.items():
            if not tensor.is_floating_point():
                raise SystemExit(
                    f"{type(model).__name__}: {name} is {tensor.dtype}; only "
                    "floating-point tensors are known"
                )
            if tensor is embed:
                spread = 0.5
            elif tensor.ndim > 1 and tensor.shape[-1] > 1:
                spread = 0.6 * tensor.shape[-1] ** -0.5
            else:
                spread = 0.25
            tensor.add_(torch.randn(tensor.shape) * spread)


def evaluate(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits [B, T, V] and the gradient [V, D]. Each document runs alone and unpadded, so that
    neither padding nor other documents can matter."""
    logits = np.zeros((*tokens.shape, VOCAB), np.float32)
    total = torch.zeros(())
    for row, length in enumerate(LENGTHS):
        ids = torch.from_numpy(tokens[row : row + 1, :length]).long()
        out = model(
            input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False
        ).logits.float()
        total = total + torch.nn.functional.cross_entropy(out[0, :-1], ids[0, 1:], reduction="sum")
        logits[row, :length] = out[0].detach().numpy()
    (total / sum(length - 1 for length in LENGTHS)).backward()
    grad = model.get_input_embeddings().weight.grad.numpy()
    for name, array in (("logits", logits), ("gradient", grad)):
        if not (np.isfinite(array).all() and array.any()):
            raise SystemExit(f"{type(model).__name__}: {name} are not finite or all zero")
    return logits, grad


def continuations(folder: Path, seed: int) -> dict[str, np.ndarray]:
    """The arrays of greedy.npz for the model of a folder."""
    config = transformers.AutoConfig.from_pretrained(folder)
    context = config.max_position_embeddings
    longest, steps = context * 3 // 8 - 1, context // 2
    sets, arrays = {"": ((1, 5, longest), steps)}, {}
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original = config.original_max_position_embeddings
        arrays["original"] = np.array(original, np.int32)
        sets = {
            "": ((original + 1, original + 3, longest), steps),
            "short_": ((1, 5, original // 2), original // 2),
        }
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
    ).eval()
    model.generation_config.eos_token_id = None
    for prefix, (lengths, steps) in sets.items():
        prompts = np.full((len(lengths), max(lengths)), -1, np.int32)
        rows = []
        for row, length in enumerate(lengths):
            prompts[row, :length], *answer = clear_continuation(model, length, steps, seed)
            rows.append(answer)
        tokens, logprobs = (np.stack(values) for values in zip(*rows, strict=True))
        named = {"prompts": prompts, "lengths": np.array(lengths, np.int32)}
        named |= {"tokens": tokens, "logprobs": logprobs}
        arrays |= {prefix + name: array for name, array in named.items()}
    return arrays


def clear_continuation(
    model: Any, length: int, steps: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A prompt [length], its tokens [steps] and their log-probabilities [steps]."""
    draws = np.random.default_rng((seed, length)).integers(3, VOCAB, (TRIES, length))
    tokens, logits = generate(model, draws, steps)
    varied = [len(set(row)) for row in tokens.tolist()]
    prompt = draws[np.argmax(np.where(lead(logits) > CLEAR_STEP, varied, 0))][None]
    tokens, logits = generate(model, prompt, steps)
    with torch.no_grad():
        whole = torch.from_numpy(np.concatenate([prompt, tokens[:, :-1]], axis=1))
        uncached = model(input_ids=whole, use_cache=False).logits[:, length - 1 :]
    name = f"{type(model).__name__}: a prompt of {length} tokens"
    if lead(logits)[0] <= CLEAR_STEP:
        raise SystemExit(f"{name}: none of {TRIES} is continued clearly")
    if np.abs(uncached.numpy() - logits).max() > CLOSE * logits.std():
        raise SystemExit(f"{name}: logits with and without transformers' cache differ")
    logprobs = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
    chosen = np.take_along_axis(logprobs, tokens[..., None], -1)[0, :, 0]
    return prompt[0], tokens[0].astype(np.int32), chosen


def generate(model: Any, prompts: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens [B, steps] after prompts [B, T], and the logits [B, steps, V] of each step."""
    ids = torch.from_numpy(prompts)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        use_cache=True,
        max_new_tokens=steps,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[:, -steps:].numpy(), torch.stack(out.logits, 1).float().numpy()


def lead(logits: np.ndarray) -> np.ndarray:
    """Least lead [B] of the best of logits [B, T, V], in standard deviations of the row."""
    best = np.sort(logits, axis=-1)
    return (best[..., -1] - best[..., -2]).min(-1) / logits.std((1, 2))
