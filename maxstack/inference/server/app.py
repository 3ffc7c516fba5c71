"""The routes of a server."""

import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from maxstack.errors import quoted
from maxstack.inference.server.chat import chat
from maxstack.inference.server.completions import completions
from maxstack.inference.server.connections import text_of
from maxstack.inference.server.embeddings import embeddings
from maxstack.inference.server.engine_requests import decode, encode, encode_messages
from maxstack.inference.server.http import check_access, read_body, state_of
from maxstack.inference.server.page import page
from maxstack.inference.server.refusal import HANDLED, Refusal, refusal_of
from maxstack.inference.server.schemas import DetokenizeBody, TokenizeBody
from maxstack.inference.server.state import State

STACK = 16 << 20
"""Bytes of stack of threads that use grammars, several times that of the sandbox."""


def make_app(state: State) -> Starlette:
    """Return the application, whose lifespan starts and ends the service."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # Before the first thread starts: grammars that compile on the sandbox's 2 MiB recurse here
        # too.
        threading.stack_size(STACK)
        state.service.start()
        yield
        state.grammars.close()
        await state.service.stop()

    app = Starlette(
        routes=[
            Route("/", page),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/tokenizer_info", tokenizer_info),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={HTTPException: _http_error} | dict.fromkeys(HANDLED, _refuse),
        lifespan=lifespan,
    )
    app.state.server = state
    return app


async def models(request: Request) -> Response:
    """List the model and its adapters."""
    state = check_access(request)
    return JSONResponse({"object": "list", "data": [_card(state, name) for name in state.models]})


async def model(request: Request) -> Response:
    """Describe one of them."""
    state = check_access(request)
    name = request.path_params["model"]
    state.adapter_of(name)
    return JSONResponse(_card(state, name))


async def tokenize(request: Request) -> Response:
    """Tokenize a text or a conversation."""
    return await (await read_body(request, TokenizeBody)).read(_tokenize)


def _tokenize(state: State, body: TokenizeBody) -> Response:
    if (body.prompt is None) == (not body.messages):
        raise Refusal(400, "give either prompt or messages", param="prompt")
    if body.prompt is not None:
        tokens = encode(state, body.prompt, body.add_special_tokens, whole=True)
    else:
        tokens = encode_messages(state, body, body.tools)
    content: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": state.served.engine.max_length,
        "tokens": tokens,
        "token_strs": None,
    }
    if body.return_token_strs:
        content["token_strs"] = [state.tokenizer.text_of(token) for token in tokens]
    return JSONResponse(content)


async def detokenize(request: Request) -> Response:
    """Turn tokens into text."""
    return await (await read_body(request, DetokenizeBody)).read(_text)


def _text(state: State, body: DetokenizeBody) -> Response:
    size, most = state.tokenizer.vocab_size, state.served.engine.max_length
    if len(body.tokens) > most:
        given = f"tokens: {len(body.tokens)} are more than serve.max_length={most}"
        raise Refusal(400, f"{given}; send fewer at a time", param="tokens")
    outside = next((token for token in body.tokens if not 0 <= token < size), None)
    if outside is not None:
        raise Refusal(400, f"tokens: {outside} is outside the tokenizer's {size}", param="tokens")
    return JSONResponse({"prompt": decode(state, body.tokens)})


async def tokenizer_info(request: Request) -> Response:
    """Describe special tokens and chat template, by the names of tokenizer_config.json."""
    state = check_access(request)
    special = state.tokenizer.special
    starts = state.tokenizer.encode(b"").tolist()
    ends = sorted(state.served.stop_tokens)
    content = {
        "tokenizer_class": type(state.tokenizer).__name__,
        "vocab_size": state.tokenizer.vocab_size,
        "model_max_length": state.served.engine.max_length,
        "bos_token": special.get(starts[0]) if starts else None,
        "bos_token_id": starts[0] if starts else None,
        "eos_token": special.get(ends[0]) if ends else None,
        "eos_token_id": ends[0] if ends else None,
        "chat_template": state.template and state.template.sources["default"],
    }
    return JSONResponse(content)


async def health(request: Request) -> Response:
    """Answer 200 while requests are taken."""
    state_of(request).service.check()
    return Response()


async def metrics(request: Request) -> Response:
    """Send metrics for Prometheus."""
    state = state_of(request)
    text = state.service.metrics.text(state.service.engine, state.name) + text_of(request.app)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _card(state: State, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "maxstack",
        "root": state.served.cfg.serve.adapters.get(name, state.served.model),
        "parent": None if name == state.name else state.name,
        "max_model_len": state.served.engine.max_length,
    }


async def _refuse(request: Request, error: Exception) -> Response:
    refusal = refusal_of(error)
    return JSONResponse(refusal.body, refusal.status, refusal.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer Starlette's errors for unknown paths and methods."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {quoted(request.url.path)}"
    refusal = Refusal(error.status_code, f"{what}: {error.detail}", kind="not_found_error")
    return JSONResponse(refusal.body, refusal.status, error.headers)
