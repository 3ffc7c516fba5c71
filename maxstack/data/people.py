"""Made-up questions about made-up people, on which the recipes of post-training learn to answer in
a format: as JSON, {"age": 36}, or in words, The age is 36."""

import random
from typing import Any

NAMES = "Ada Ben Cleo Dan Eva Finn Gil Hana Ivo Jan Kim Leo Mia Noa Otto Pia".split()
CITIES = "Rome Oslo Bern Lima Cairo Delhi Paris Quito Seoul Tunis".split()


def chat(index: int) -> dict[str, Any]:
    """Return a conversation; half of the answers are JSON."""
    prompt, as_json, in_words, random = _question(index)
    answer = as_json if random.random() < 0.5 else in_words
    return {"messages": [*prompt, {"role": "assistant", "content": answer}]}


def pairs(index: int) -> dict[str, Any]:
    """Return a preference: JSON rather than words."""
    prompt, as_json, in_words, _ = _question(index)
    return {"prompt": prompt, "chosen": as_json, "rejected": in_words}


def labelled(index: int) -> dict[str, Any]:
    """Return an answer, which is wanted if it is JSON."""
    prompt, as_json, in_words, random = _question(index)
    wanted = random.random() < 0.5
    return {"prompt": prompt, "completion": as_json if wanted else in_words, "label": wanted}


def prompts(index: int) -> dict[str, Any]:
    """Return a question alone, with both answers to hold others against."""
    prompt, as_json, in_words, _ = _question(index)
    return {"id": index, "messages": prompt, "json": as_json, "words": in_words}


def _question(index: int) -> tuple[list[dict[str, str]], str, str, random.Random]:
    draw = random.Random(index)
    name = draw.choice(NAMES)
    age = draw.randrange(18, 99)
    city = draw.choice(CITIES)
    field = draw.choice(("name", "age", "city"))
    value = {"name": name, "age": age, "city": city}[field]
    quoted = value if field == "age" else f'"{value}"'
    prompt = [{"role": "user", "content": f"{name}, {age}, {city}. {field}?"}]
    return prompt, f'{{"{field}": {quoted}}}', f"The {field} is {value}.", draw
