"""Rewards that the tests of rollouts import."""


def vowels(prompt, completion, row):
    """Has signal from random weights on."""
    return sum(map(completion.count, "aeiou")) + len({*completion}) / 10


def parts(prompt, completion, row):
    """Two components."""
    return {"length": len(completion) / 10, "prompt": float(len(prompt) > 0)}


def even(prompt, completion, row):
    """0 for half of the prompts, whatever the answer."""
    return vowels(prompt, completion, row) if row["id"] % 2 else 0.0


def picky(prompt, completion, row):
    """Raises for a quarter of the prompts, and is no number for another."""
    if row["id"] % 4 == 0:
        raise ValueError("no such letter")
    return float("nan") if row["id"] % 4 == 1 else vowels(prompt, completion, row)
