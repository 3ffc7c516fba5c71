"""The routes of a server of packages: the Open Inference Protocol, version 2, and its repository.

https://github.com/kserve/open-inference-protocol, with Triton's extensions for binary tensors and
for the repository.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from importlib import metadata as distribution
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from maxstack.errors import quoted, shortened
from maxstack.inference.packages import message
from maxstack.inference.packages.repository import Repository
from maxstack.inference.packages.version import Version
from maxstack.inference.server.admission import Access, read_bytes
from maxstack.inference.server.connections import text_of
from maxstack.inference.server.refusal import Refusal, refusal_of
from maxstack.inference.server.threads import Threads
from maxstack.inference.service import Full
from maxstack.package.loader import PackageError

BODY = 64 << 20
"""Bytes of a request's body at most."""
SMALL = 16 << 10
"""Bytes of a body that is read on the event loop; more is work for a thread."""
FEW = 2 << 10
"""Bytes of arrays that are written on the event loop."""
EXTENSIONS = ["binary_tensor_data", "model_repository", "model_configuration"]
MODEL = "/v2/models/{name}"
VERSION = MODEL + "/versions/{version}"


def make_app(repository: Repository, access: Access) -> Starlette:
    """Return the application, whose lifespan starts and ends the repository."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        repository.start()
        yield
        await repository.stop()

    routes = [
        *(Route(f"{path}/infer", infer, methods=["POST"]) for path in (MODEL, VERSION)),
        Route("/health", ready),
        Route("/metrics", metrics),
        Route("/v2", server),
        Route("/v2/health/live", live),
        Route("/v2/health/ready", ready),
        Route("/v2/models", models),
        Route("/v2/repository/index", index, methods=["POST"]),
        Route("/v2/repository/models/{name}/load", load, methods=["POST"]),
        Route("/v2/repository/models/{name}/unload", unload, methods=["POST"]),
    ]
    for path in (MODEL, VERSION):
        routes += [
            Route(path, metadata),
            Route(f"{path}/ready", model_ready),
            Route(f"{path}/config", config),
        ]
    handlers: dict[Any, Any] = {HTTPException: _http_error, Exception: _failed}
    app = Starlette(
        routes=routes,
        exception_handlers=handlers | dict.fromkeys((Refusal, PackageError, Full), _refused),
        lifespan=lifespan,
    )
    app.state.repository = repository
    app.state.access = access
    app.state.threads = Threads()
    return app


async def server(request: Request) -> Response:
    """Describe this server."""
    _repository(request)
    version = distribution.version("maxstack")
    return JSONResponse({"name": "maxstack", "version": version, "extensions": EXTENSIONS})


async def live(request: Request) -> Response:
    """Answer 200 while the process lives."""
    return JSONResponse({"live": True})


async def ready(request: Request) -> Response:
    """Answer 200 while requests are taken."""
    request.app.state.repository.check()
    return JSONResponse({"ready": True})


async def metrics(request: Request) -> Response:
    """Send metrics for Prometheus."""
    text = request.app.state.repository.text() + text_of(request.app)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


async def models(request: Request) -> Response:
    """List the names of all models, for KServe's clients."""
    return JSONResponse({"models": _repository(request).names})


async def metadata(request: Request) -> Response:
    """Describe inputs and outputs of a model."""
    version, name = _found(request)
    return JSONResponse(version.metadata(name))


async def config(request: Request) -> Response:
    """Describe a model as Triton's configuration does."""
    version, name = _found(request)
    return JSONResponse(version.config(name))


async def model_ready(request: Request) -> Response:
    """Answer 200 while a model takes requests."""
    _, name = _found(request)
    _repository(request).check()
    return JSONResponse({"name": name, "ready": True})


async def index(request: Request) -> Response:
    """List versions that are served, and those that were refused."""
    repository = _repository(request)
    only_ready = (await _fields(request)).get("ready", False)
    rows = repository.index()
    return JSONResponse([row for row in rows if row["state"] == "READY" or not only_ready])


async def load(request: Request) -> Response:
    """Serve the newest version of a model."""
    repository, fields = _repository(request), await _fields(request)
    if fields.get("parameters"):
        raise Refusal(400, "parameters: this server takes none; a package has its own settings")
    await repository.load(request.path_params["name"])
    return JSONResponse({})


async def unload(request: Request) -> Response:
    """Stop serving a model."""
    repository = _repository(request)
    await _fields(request)
    await repository.unload(request.path_params["name"])
    return JSONResponse({})


async def infer(request: Request) -> Response:
    """Answer an inference request."""
    repository = _repository(request)
    repository.check()
    # A compressed body could expand beyond every limit.
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        raise Refusal(415, f"Content-Encoding: {quoted(coding)}; send the body as it is")
    body = await read_bytes(request, BODY)
    # Again: reading a body may take a minute, and the server may have begun to end.
    repository.check()
    began = time.perf_counter()
    version, name = _found(request)
    metrics = version.queues[name].metrics
    metrics.requests += 1
    try:
        # Until the answer is written, so that a replaced version keeps its memory for it.
        with version.use():
            return await _answered(request, body, version, name)
    except Exception:
        metrics.failures += 1
        raise
    finally:
        metrics.latency.observe(time.perf_counter() - began)


async def _answered(request: Request, body: bytes, version: Version, name: str) -> Response:
    queue = version.queues[name]
    header = request.headers.get(message.HEADER)

    def read() -> Any:
        ask = message.read(body, header, name, queue.signature.spec)
        return ask, queue.request(ask.inputs)

    # A thread costs more than reading so little.
    if len(body) <= SMALL:
        ask, waiting = read()
    else:
        # By its JSON, not its body: binary tensors are read without work for each element.
        state, size = request.app.state, message.json_size(body, header)
        ask, waiting = await state.threads.run(size, state.access.check(request), read)
    answer = await _repository(request).worker.submit(queue, waiting)
    told = {
        "batch_size": answer.rows,
        "padded_to": answer.padded,
        "queue_us": round(answer.waited * 1e6),
    }

    def write() -> tuple[bytes, dict[str, str]]:
        return message.write(ask, name, str(version.number), answer.results, told)

    size = sum(array.nbytes for array in answer.results.values())
    content, headers = write() if size <= FEW else await asyncio.to_thread(write)
    return Response(content, headers=headers)


def _repository(request: Request) -> Repository:
    """Return the models, with the refusals of `Access.check`, and without keys for a page of
    another site, which its browser names in Origin."""
    state = request.app.state
    state.access.check(request)
    # Bodies need no JSON content type here, so another site could post without a preflight.
    if not state.access.keys and "origin" in request.headers:
        raise Refusal(403, "Origin: pages of other sites may not ask; see --api-key-file")
    return state.repository


def _found(request: Request) -> tuple[Version, str]:
    name = request.path_params["name"]
    version, _ = _repository(request).find(name, request.path_params.get("version"))
    return version, name


async def _fields(request: Request) -> dict[str, Any]:
    """Read the JSON object of a body, which may be empty."""
    body = await read_bytes(request, SMALL)
    return message.read_object(body) if body else {}


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, Full):
        error = refusal_of(error)
    content = {"error": shortened(str(error), 1000)}
    if isinstance(error, Refusal):
        return JSONResponse(content, error.status, error.headers)
    return JSONResponse(content, 400)


async def _failed(request: Request, error: Exception) -> Response:
    """Answer an error of ours, which uvicorn logs."""
    return JSONResponse({"error": "the server failed; its log says why"}, 500)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer Starlette's errors for unknown paths and methods."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {quoted(request.url.path)}: {error.detail}"
    return JSONResponse({"error": what}, error.status_code, error.headers)
