"""`maxstack serve --open`."""

import threading
import webbrowser

import pytest

from maxstack.commands import generate, serve

PLACES = {
    "a browser of the user's": ({"BROWSER": "firefox", "SSH_CONNECTION": "1"}, True),
    "a screen": ({"DISPLAY": ":0"}, True),
    "SSH": ({"DISPLAY": ":0", "SSH_CONNECTION": "1"}, False),
    "no screen": ({}, False),
}


@pytest.fixture
def bare(monkeypatch):
    for name in ("BROWSER", "SSH_CONNECTION", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(webbrowser, "get", lambda: None)
    return monkeypatch


@pytest.mark.parametrize("place", PLACES)
def test_a_page_is_shown_where_somebody_sees_it(bare, place):
    names, shown = PLACES[place]
    for name, value in names.items():
        bare.setenv(name, value)
    assert serve._has_browser() is shown


def test_without_a_browser_the_terminal_chats(bare):
    given = []
    bare.setattr(generate, "main", given.append)
    serve.main(["model.gguf", "--open", "--chat-template", "a.jinja", "model.dtype=bfloat16"])
    wanted = "model.gguf --chat --temperature 0.3 --chat-template a.jinja model.dtype=bfloat16"
    assert given == [wanted.split()]


def test_the_page_is_opened_with_its_temperature(bare):
    opened, seen = threading.Event(), []
    bare.setattr(webbrowser, "open", lambda page: (seen.append(page), opened.set()))
    said = serve._announce("tiny", True, "http://127.0.0.1:1")
    assert said == "tiny: http://127.0.0.1:1/v1, and in a browser http://127.0.0.1:1"
    assert opened.wait(10)
    assert seen == ["http://127.0.0.1:1/#temperature=0.3"]
