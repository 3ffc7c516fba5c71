"""Near duplicates of a made-up corpus against the Jaccard index of all its pairs: precision and
recall of the step near_duplicates, and what the theory of its bands and estimate expects.

Half of the documents are new; each of the others repeats one of them, with a run of its words
replaced so that the indices spread over 0.5 to 1.

example: python scripts/bench/near_duplicates.py --documents 20000 --threshold 0.8
"""

import sys
import time
from pathlib import Path

import numpy as np
import scipy.sparse
import scipy.stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import arguments  # noqa: E402

from maxstack.data.steps.duplicates import (  # noqa: E402
    banded,
    found,
    keepers,
    shingles,
    signatures,
)
from maxstack.schema.steps import NearDuplicatesStep  # noqa: E402

WORDS, VOCABULARY = 300, 20_000


def corpus(count: int, rng: np.random.Generator) -> list[str]:
    """Documents of words by Zipf's law; document i + count / 2 repeats document i."""
    share = 1 / np.arange(1, VOCABULARY + 1)
    draw = rng.choice(VOCABULARY, (count, WORDS), p=share / share.sum())
    half = count // 2
    jaccard = rng.uniform(0.5, 1, half)
    kept = np.round(WORDS * 2 * jaccard / (1 + jaccard)).astype(int)
    for at in range(half):
        draw[half + at, : kept[at]] = draw[at, : kept[at]]
    return [" ".join(f"w{word}" for word in row) for row in draw]


def pairs_by_force(cfg: NearDuplicatesStep, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """(pairs [N, 2], their Jaccard index) of all pairs that share an n-gram."""
    sets = [np.unique(shingles(cfg, text)) for text in texts]
    sizes = np.array([*map(len, sets)])
    _, columns = np.unique(np.concatenate(sets), return_inverse=True)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    held = scipy.sparse.csr_array((np.ones(len(columns), np.int32), columns, ends))
    shared = scipy.sparse.triu(held @ held.T, 1).tocoo()
    left, right = shared.coords
    return np.stack([left, right], 1), shared.data / (sizes[left] + sizes[right] - shared.data)


def main() -> None:
    """Measure."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--threshold", type=float, default=0.8)
    parser.add_argument("--permutations", type=int, default=128)
    args = parser.parse_args()
    cfg = NearDuplicatesStep(
        kind="near_duplicates", threshold=args.threshold, permutations=args.permutations
    )
    texts = corpus(args.documents, np.random.default_rng(0))
    megabytes = sum(map(len, texts)) / 1e6
    began = time.process_time()
    signed = signatures(cfg, texts)
    signing = time.process_time() - began
    began = time.process_time()
    labels, _ = keepers(cfg, signed)
    comparing = time.process_time() - began
    began = time.process_time()
    pairs, jaccard = pairs_by_force(cfg, texts)
    force = time.process_time() - began
    joined = labels[pairs[:, 0]] == labels[pairs[:, 1]]
    true = jaccard >= cfg.threshold
    rows = banded(cfg.permutations, cfg.threshold)[0].stop
    least = np.ceil(cfg.permutations * cfg.threshold) - 1
    expected = found(cfg.permutations, rows, jaccard) * scipy.stats.binom.sf(
        least, cfg.permutations, jaccard
    )
    print(
        f"{len(texts):,} documents, {megabytes:.1f} MB: signatures {megabytes / signing:.1f} MB/s "
        f"a core, comparison {comparing:.2f} s, all {len(pairs):,} pairs with a common n-gram by "
        f"force {force:.1f} s; bands of {rows} rows"
    )
    print(
        f"threshold {cfg.threshold}: {true.sum():,} pairs at or above; "
        f"precision {(joined & true).sum() / joined.sum():.4f} "
        f"(theory {expected[true].sum() / expected.sum():.4f}), "
        f"recall {(joined & true).sum() / true.sum():.4f} (theory {expected[true].mean():.4f})"
    )
    for low in np.arange(0.45, 1, 0.05):
        part = (jaccard >= low) & (jaccard < low + 0.05 + 1e-9 * (low > 0.94))
        if part.any():
            print(
                f"Jaccard {low:.2f} to {low + 0.05:.2f}: {part.sum():>6,} pairs, "
                f"joined {joined[part].mean():.4f}, theory {expected[part].mean():.4f}"
            )


if __name__ == "__main__":
    main()
