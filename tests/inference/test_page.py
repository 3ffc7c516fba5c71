"""The page of `maxstack serve` in a browser, before real servers."""

import json

import httpx
import parity
import pytest
from browser import browsing
from served import make, serving

LENGTH = 4096
MARKUP = "<b>bold</b><img src=x onerror=alert(1)>&amp;"
ANSWER = "document.querySelector('.assistant .text').textContent"
pytestmark = pytest.mark.slow
IDLE = "document.querySelector('#stop').hidden"
CHANGED = """
window.own ??= window.fetch;
window.fetch = (path, options) => {
  const body = options.body && JSON.stringify({...JSON.parse(options.body), ...%s});
  return own(path, {...options, body});
};
0"""
"""Adds fields to the bodies of requests."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@pytest.fixture(scope="module")
def server(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    adapter = f"serve.adapters.tuned={parity.GOLDENS / 'adapters' / 'lora-llama'}"
    model = make(folder / "model", LENGTH)
    with serving(model, folder / "log", "serve.max_requests=4", adapter) as server:
        yield server


@pytest.fixture
def tab(browser, server):
    """The page, newly opened."""
    browser.call("Emulation.setDeviceMetricsOverride", **size(800, 600))
    browser.open(origin_of(server))
    browser.wait("document.querySelectorAll('#model option').length == 2")
    return browser


def origin_of(server):
    return str(server.http.base_url).rstrip("/")


def size(width, height):
    return {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}


def set_field(tab, name, text):
    tab.run(f"document.querySelector('#{name}').value = {json.dumps(text)}")


def say(tab, text):
    """Type into the box and send, without waiting for the answer."""
    tab.run("document.querySelector('#message').focus()")
    tab.type(text)
    tab.press("Enter")


def answered(tab, text, **fields):
    """The answer that is shown."""
    for name, value in ({"max_tokens": "24", "temperature": "0", "seed": "3"} | fields).items():
        set_field(tab, name, value)
    say(tab, text)
    tab.wait(f"{IDLE} && document.querySelector('#status').textContent")
    return tab.run("[...document.querySelectorAll('.assistant .text')].at(-1).textContent")


def expected(server, *contents, **options):
    roles = ("user", "assistant") * len(contents)
    messages = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]
    answer = server.chat(messages=messages, temperature=0, **options)
    return answer.choices[0].message.content


def test_answers_are_those_of_the_api_message_by_message(tab, server):
    first = answered(tab, "Hello")
    assert len(first) > 10 and first == expected(server, "Hello")
    assert answered(tab, "More") == expected(server, "Hello", first, "More")
    for words in ("read, 24 written", "tokens/s", "seed 3"):
        assert words in tab.text("#status")


def test_settings_and_the_adapter_reach_the_api(tab, server):
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    set_field(tab, "model", "tuned")
    text = answered(tab, "Hello", system="Be kind.", temperature="0.7", top_p="0.9", seed="8")
    options = {"temperature": 0.7, "top_p": 0.9, "seed": 8, "messages": messages}
    assert text == server.chat(model="tuned", **options).choices[0].message.content
    assert text != server.chat(**options).choices[0].message.content


def test_settings_come_with_the_address(tab):
    tab.run("location.hash = 'temperature=0.3&log=none'")
    tab.reload()
    fields = (
        "[document.querySelector('#temperature').value, Boolean(document.querySelector('#log'))]"
    )
    assert tab.run(fields) == ["0.3", True]


def test_stop_ends_the_answer_and_frees_its_pages(tab, server):
    before = server.metric("generation_tokens_total")
    tab.run(CHANGED % '{"ignore_eos": true}')
    set_field(tab, "max_tokens", "4000")
    say(tab, "Hello")
    tab.wait(f"{ANSWER}.length > 5")
    tab.press("Escape")
    tab.wait(f"{IDLE} && document.querySelector('#status').textContent.startsWith('ended by you')")
    server.wait_until_idle()
    assert server.metric("generation_tokens_total") - before < 3900
    assert len(tab.text(".assistant .text")) > 5


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", "-1", "temperature=-1"),
        ("top_p", "0,7", "top_p='0,7'"),
        ("seed", "9007199254740993", "seed='9007199254740993'"),
    ],
)
def test_a_refusal_is_shown_and_the_message_is_kept(tab, field, value, words):
    set_field(tab, field, value)
    say(tab, "Hello")
    assert words in tab.wait(f"{IDLE} && document.querySelector('#error').textContent")
    assert tab.run("document.querySelector('#message').value") == "Hello"
    assert tab.run("document.querySelectorAll('article').length") == 0
    set_field(tab, field, "")
    set_field(tab, "message", "")
    assert answered(tab, "Hello") and tab.run("document.querySelector('#error').hidden")


def test_an_error_in_a_stream_and_a_cut_stream_are_shown_beside_what_came(tab):
    chunk = {"choices": [{"index": 0, "delta": {"content": "part"}, "finish_reason": None}]}
    error = {"error": {"message": "the engine failed"}}
    for events, words in (([chunk, error], "the engine failed"), ([chunk], "connection ended")):
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        tab.run(f"window.fetch = async () => new Response({json.dumps(text)}); 0")
        say(tab, "Hello")
        tab.wait(f"document.querySelector('#error').textContent.includes('{words}')")
        assert tab.text("article:last-of-type .text") == "part"


def test_markup_is_shown_as_text(tab):
    escaped = MARKUP.replace("(", r"\(").replace(")", r"\)")
    tab.run(CHANGED % json.dumps({"guided_regex": escaped}))
    answered(tab, MARKUP, max_tokens="200")
    for role in ("user", "assistant"):
        assert tab.text(f".{role} .text") == MARKUP
        assert tab.run(f"document.querySelector('.{role} .text').children.length") == 0


def test_copy_gives_the_text_and_clear_begins_anew(tab, server):
    origin = origin_of(server)
    allowed = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    tab.call("Browser.grantPermissions", origin=origin, permissions=allowed)
    tab.call("Page.bringToFront")
    tab.run(CHANGED % '{"guided_regex": "a <b>\\\\n c"}')
    text = answered(tab, "Hello")
    tab.click(".assistant button")
    tab.wait("document.querySelector('#status').textContent == 'Copied.'")
    assert tab.run("navigator.clipboard.readText()") == text == "a <b>\n c"
    tab.click("#clear")
    assert tab.run("document.querySelectorAll('article').length") == 0
    assert answered(tab, "Hello") == text


def test_no_request_leaves_the_servers_origin(tab, server):
    answered(tab, "Hello")
    origin = origin_of(server)
    asked = tab.requests()
    assert f"{origin}/v1/chat/completions" in asked
    assert {url for url in asked if not url.startswith((f"{origin}/", "data:"))} == set()
    other = origin.replace("127.0.0.1", "localhost")
    reach = "fetch('%s/health', {mode: 'no-cors'}).then(() => true, () => false)"
    assert tab.run(reach % origin) and not tab.run(reach % other)


def test_the_policy_refuses_scripts_and_markup_of_others(tab):
    refused = (
        "(() => { try { document.body.innerHTML = '<b>x</b>'; return false }"
        "catch (error) { return error instanceof TypeError } })()"
    )
    assert tab.run(refused)
    tab.run(
        "document.head.append(Object.assign(document.createElement('style'), {textContent:"
        "'body { color: red }'}))"
    )
    assert tab.run("getComputedStyle(document.body).color") != "rgb(255, 0, 0)"


def test_all_controls_have_names_and_the_keyboard_reaches_them(tab):
    tab.click("summary")
    controls = tab.run("document.querySelectorAll('input, select, textarea, button').length")
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "combobox"}
    named = [
        node["name"]["value"]
        for node in nodes
        if node.get("role", {}).get("value") in roles and not node["ignored"]
    ]
    assert len(named) == controls - 1 and all(named)  # stop is hidden
    tab.run("document.querySelector('#model').focus()")
    reached = {"model"}
    for _ in range(20):
        tab.press("Tab")
        reached.add(tab.run("document.activeElement.id"))
        if "send" in reached:  # beyond it the focus leaves the page
            break
    assert {"model", "clear", "system", "temperature", "key", "log", "message", "send"} <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_and_fits_a_phone(tab, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    tab.call("Emulation.setEmulatedMedia", features=features)
    tab.call("Emulation.setDeviceMetricsOverride", **size(360, 640))
    tab.run(CHANGED % '{"guided_regex": "W{150}"}')
    answered(tab, "W" * 150, max_tokens="200")
    tab.click("summary")
    for selector in ("html", "#log"):
        element = f"document.querySelector('{selector}')"
        assert tab.run(f"{element}.scrollWidth <= Math.min(360, {element}.clientWidth)")
    for selector in ("article .text", "#status", "#send", "h2"):
        assert tab.contrast(selector) >= 4.5


@pytest.mark.release
def test_a_model_without_template_completes_texts_for_those_with_a_key(browser, tmp_path):
    """One server, because each takes seconds to start."""
    folder = make(tmp_path / "model", LENGTH)
    (folder / "chat_template.jinja").unlink()
    (tmp_path / "keys").write_text("secret")
    options = "--api-key-file", str(tmp_path / "keys")
    with serving(folder, tmp_path / "log", *options, key="secret") as server:
        assert httpx.get(server.http.base_url).status_code == 200
        browser.open(origin_of(server))
        browser.wait("document.querySelector('#error').textContent.includes('key is missing')")
        browser.click("summary")
        browser.click("#key")
        browser.type("secret")
        browser.press("Enter")
        browser.wait("document.querySelector('#model').value == 'tiny'")
        assert browser.run("document.querySelector('#error').hidden")
        assert not browser.run("document.querySelector('#plain').hidden")
        browser.click("#message")
        text = answered(browser, "def ")
        assert text == server.complete("def ", temperature=0, max_tokens=24).choices[0].text
        kept = "[document.cookie, Object.keys(localStorage), Object.keys(sessionStorage)].join('')"
        assert browser.run(kept) == ""
        browser.reload()
        browser.wait("document.querySelector('#error').textContent.includes('key is missing')")
        assert browser.run("document.querySelector('#key').value") == ""
