"""The page to talk to the model in a browser."""

import functools
import re
from importlib import resources

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from maxstack.report.document import source


async def page(request: Request) -> Response:
    """Send the page, to everybody: it holds no secret, and its API calls send the key."""
    text, policy = _read()
    headers = {
        "Content-Security-Policy": policy,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)


@functools.cache
def _read() -> tuple[str, str]:
    """Return the page, and the policy that allows its own script and its own server alone."""
    text = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    # By hash, not 'unsafe-inline': text of an answer can never run as a script.
    own = {tag: _digest(text, tag) for tag in ("script", "style")}
    rules = [
        "default-src 'none'",
        "connect-src 'self'",
        "img-src data:",
        f"script-src {own['script']}",
        f"style-src {own['style']}",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    return text, "; ".join(rules)


def _digest(text: str, tag: str) -> str:
    """Return the hash source of the page's only element of this kind."""
    content = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.S)
    assert len(content) == 1, tag
    return source(content[0])
