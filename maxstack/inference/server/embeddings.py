"""/v1/embeddings."""

import asyncio
import base64
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from maxstack.inference.pooling import Pooling, read_pooling
from maxstack.inference.request import Sampling
from maxstack.inference.server.answering import read_body, state_of, whole
from maxstack.inference.server.asks import encode, separate
from maxstack.inference.server.schemas import EmbeddingBody
from maxstack.inference.server.state import State
from maxstack.inference.service import Answers, Ask

SAMPLING = Sampling(max_tokens=1, temperature=0.0, embed=True)


async def embeddings(request: Request) -> Response:
    """Answer with vectors of texts."""
    state, body = state_of(request), await read_body(request, EmbeddingBody)
    state.service.check()
    pooling = _pooling(state.served.folder or Path(state.served.model))
    pooling.check(body.dimensions)
    prompts = await asyncio.to_thread(_prompts, state, body, pooling)
    adapter = state.adapter_of(body.model)
    answers = state.service.submit([Ask(prompt, SAMPLING, 0, adapter) for prompt in prompts])
    return await whole(request, answers, _written(state, body, pooling, prompts, answers))


@functools.cache
def _pooling(folder: Path) -> Pooling:
    return read_pooling(folder)


def _prompts(state: State, body: EmbeddingBody, pooling: Pooling) -> list[Sequence[int]]:
    after = pooling.after if body.add_special_tokens else ()
    return [
        [*encode(state, given, body.add_special_tokens), *after]
        if isinstance(given, str)
        else given
        for given in separate(body.input, "input")
    ]


async def _written(
    state: State,
    body: EmbeddingBody,
    pooling: Pooling,
    prompts: Sequence[Sequence[int]],
    answers: Answers,
) -> dict[str, Any]:
    vectors: dict[int, Any] = {}
    async for index, output in answers:
        vector = pooling.vector(output.embedding, body.dimensions).astype("<f4")
        coded = base64.b64encode(vector.tobytes()).decode()
        vectors[index] = coded if body.encoding_format == "base64" else vector.tolist()
    count = sum(map(len, prompts))
    return {
        "object": "list",
        "model": body.model or state.name,
        "data": [
            {"object": "embedding", "index": index, "embedding": vectors[index]}
            for index in range(len(prompts))
        ],
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }
