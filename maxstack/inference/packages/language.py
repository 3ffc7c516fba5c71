"""OpenAI's API for packages that generate: the engine on their programs, an application each."""

import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from maxstack.inference.package_engine import can_generate, start_package
from maxstack.inference.packages.repository import Repository
from maxstack.inference.server.admission import Access
from maxstack.inference.server.app import make_app
from maxstack.inference.server.state import State
from maxstack.inference.service import Service
from maxstack.inference.tools import guess_format
from maxstack.package.loader import Package


class Language:
    """A package that generates, behind OpenAI's API."""

    def __init__(self, name: str, package: Package, queue: int, access: Access):
        served = start_package(package)
        self.name = name
        self.service = Service(served.engine, queue)
        # Before the server listens, as for a run: programs compile for seconds.
        self.service.warm()
        template = served.template
        tools = guess_format("\n".join(template.sources.values())) if template else None
        parts = served, self.service, name, template, tools, access, int(time.time())
        self.app = make_app(State(*parts))


def languages(repository: Repository, queue: int, access: Access) -> list[Language]:
    """Return the packages that generate, as they are at the start."""
    return [
        Language(model.name, model.current.package, queue, access)
        for model in repository.models
        if model.current and can_generate(model.current.package)
    ]


async def _unknown(request: Request) -> Response:
    """Answer 404 for unknown paths of the Open Inference Protocol, not OpenAI's error."""
    raise HTTPException(404)


def mount(app: Starlette, found: Sequence[Language]) -> None:
    """Add routes to the application of packages: the first one's under /v1, each under
    /models/NAME/v1."""
    # Starlette runs no lifespan of a mounted application, so run them around the outer one's.
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for language in found:
                await stack.enter_async_context(language.app.router.lifespan_context(language.app))
            await stack.enter_async_context(inner(app))
            yield

    app.router.lifespan_context = lifespan
    # Before the mount at /, which would take every path.
    app.router.routes.append(Route("/v2/{path:path}", _unknown, methods=["GET", "POST"]))
    for language in found:
        app.router.routes.append(Mount(f"/models/{language.name}", app=language.app))
    app.router.routes.append(Mount("/", app=found[0].app))
