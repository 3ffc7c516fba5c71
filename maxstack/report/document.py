"""The report's page: one HTML file with its scripts, styles and data inside."""

import base64
import hashlib
import html
import json
import string
from collections.abc import Mapping
from importlib import resources
from typing import Any

# Everything is inside the one file, so that it can be sent, and opened without a network.
FILES = {
    "css": "page.css",
    "script": "page.js",
    "uplot_css": "uPlot.min.css",
    "uplot": "uPlot.iife.min.js",
    "licence": "uPlot.LICENSE",
}
"""Placeholder in page.html -> file."""


def page(data: Mapping[str, Any], live: bool = False) -> str:
    """Return the page with the data. Its policy allows only its own scripts and no requests, except
    to its own server if it is `live`."""
    # Hashes of the inline elements, not 'unsafe-inline': texts of a run's data cannot become
    # scripts.
    parts = {name: read(file) for name, file in FILES.items()}
    text = string.Template(read("page.html"))
    title = "maxstack: " + ", ".join(run["name"] for run in data["runs"])
    return text.substitute(parts, policy=policy(live), title=html.escape(title), data=encoded(data))


def plain(title: str, body: str) -> str:
    """Return a page without scripts around an HTML body."""
    css = read(FILES["css"])
    rules = f"default-src 'none'; style-src {source(css)}; base-uri 'none'; form-action 'none'"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{rules}">\n'
        f"<title>{html.escape(title)}</title>\n<style>{css}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def encoded(data: Mapping[str, Any]) -> str:
    """Encode the data as JSON that is safe inside HTML."""
    # "</script>" in a text would end the element; NaN is no JSON, and no browser reads it.
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def policy(live: bool) -> str:
    """Return the content security policy of the page."""
    scripts = ("uplot", "script")
    styles = ("uplot_css", "css")
    rules = [
        "default-src 'none'",
        f"script-src {' '.join(source(read(FILES[name])) for name in scripts)}",
        f"style-src {' '.join(source(read(FILES[name])) for name in styles)}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    if live:
        rules.append("connect-src 'self'")
    return "; ".join(rules)


def source(content: str) -> str:
    """Return the source expression of an inline element (Content Security Policy Level 3,
    2.3.1)."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def read(name: str) -> str:
    """Read a file of the folder page/."""
    return resources.files(__package__).joinpath("page", name).read_text(encoding="utf-8")
