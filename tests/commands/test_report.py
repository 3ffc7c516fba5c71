"""`maxstack report`: the page in a browser, of a run that was killed, spiked and resumed."""

import hashlib
import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
import time

import processes
import pytest
import spiked
from browser import browsing
from PIL import Image

from maxstack import cli
from maxstack.commands.report import Pages
from maxstack.report import document, run_data

ATTACK = (
    "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>&lt;b&gt;"
)
SIZE = {"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": False}
INK = """
[...document.querySelectorAll('.plot canvas')].map((canvas) => new Set(
  canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data).size)
"""
"""Different bytes in the pixels of each chart."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run's folder."""
    folder = spiked.make(tmp_path_factory.mktemp("runs"), "spiked")
    (folder / "samples").mkdir()
    Image.new("RGB", (8, 8), "red").save(folder / "samples" / "00000012.png")
    rows = [
        {"step": 36, "samples": ["a first text", "a second"]},
        {"step": 36, "tasks/arc/acc": 0.25, "tasks/arc/acc_stderr": 0.01, "tasks/core": 0.125},
        {"step": 36, "device_skew": 1.5, "host_skew": 0.2, "router_loss": 0.1},
    ]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "log.txt").open("a") as file:
        file.write(
            "2026-01-01 00:00:00 step 36: process 1 (there) is slow: its devices need more\n"
        )
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("browser")) as tab:
        tab.call("Emulation.setDeviceMetricsOverride", **SIZE)
        yield tab


def opened(browser, tmp_path, *words):
    """The page of runs, opened."""
    out = tmp_path / "report.html"
    assert cli.main(["report", *map(str, words), "--out", str(out)]) == 0
    browser.open(out.as_uri())
    browser.wait("charts.length > 0")
    return out


def texts(browser, selector):
    return browser.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.textContent)"
    )


@pytest.mark.slow
def test_charts_are_drawn_without_an_error_or_a_request(browser, run, tmp_path):
    out = opened(browser, tmp_path, run)
    captions = " ".join(texts(browser, "figcaption"))
    for title in (
        *("Training loss nats a token", "Held-out loss", "tasks/core"[6:], "Learning rate"),
        *("Gradient norm", "Throughput tokens/s", "Data wait % of a step", "Goodput so far"),
        "Slowest device",
    ):
        assert title in captions
    browser.click("summary")
    browser.wait("document.querySelectorAll('details .plot canvas').length > 0")
    ink = browser.run(INK)
    assert len(ink) == len(texts(browser, "figcaption")) > 10 and min(ink) > 10
    assert browser.problems() == []
    assert {url for url in browser.requests() if not url.startswith("data:")} == {out.as_uri()}


def test_spikes_rewinds_resumes_and_lost_time_are_shown(browser, run, tmp_path):
    opened(browser, tmp_path, run)
    marks = browser.run(
        "[...document.querySelectorAll('#marks li')].map((item) => item.dataset.kind)"
    )
    assert {*marks} == {"spike", "rewind", "resume", "passed over", "checkpoint"}
    events = browser.run("data.runs[0].events")
    assert {step for step, kind in events if kind == "spike"} == {20, 30, 31}
    assert {step for step, kind in events if kind == "passed over"} == {28, 29, 30, 31}
    assert [24, "rewind"] in events and any(kind == "resume" for _, kind in events)
    drawn = browser.run(INK)
    browser.click("#marks-shown")
    assert browser.run(INK) != drawn
    causes = texts(browser, "section[aria-label='Where the time went'] td:first-child")
    assert {"useful", "start-up", "restore", "save", "evaluation", "lost work", "idle"} <= {*causes}
    bar = browser.run(
        "[...document.querySelectorAll('.bar div')].reduce((sum, part) => sum +"
        " part.offsetWidth, 0) / document.querySelector('.bar').offsetWidth"
    )
    assert bar == pytest.approx(1, abs=0.02)
    body = browser.text("main")
    for words in (
        *("finished", "of 36, 100.0 %", "steps that count", "1 restart", "a second"),
        *("process 1 (there) is slow", "± 0.01", "checkpoints/36", "rewound to step 24"),
    ):
        assert words in body, words
    assert browser.run("document.querySelector('.pictures img').naturalWidth") == 8


def test_what_a_run_holds_is_shown_as_text(browser, run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "a<b>&amp;")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 36, "samples": [ATTACK]}) + "\n")
        file.write(json.dumps({"step": 36, f"tasks/{ATTACK}": 1.0, ATTACK: 2.0}) + "\n")
    with (folder / "log.txt").open("a") as file:
        file.write(f"2026-01-01 00:00:00 step 36: process 0 ({ATTACK}) is slow: {ATTACK}\n")
    (folder / "versions.json").write_text(json.dumps({ATTACK: ATTACK}))
    config = (folder / "config.yml").read_text()
    (folder / "config.yml").write_text(config.replace("kind: next_token", f"kind: {ATTACK!r}"))
    shutil.copytree(run, tmp_path / "other")
    opened(browser, tmp_path, folder, tmp_path / "other")
    browser.run("document.querySelectorAll('summary').forEach((each) => each.click())")
    body = browser.text("main")
    assert body.count(ATTACK) > 5 and texts(browser, "h1") == ["a<b>&amp; · other"]
    assert browser.run("document.querySelectorAll('img[src=x], b b').length") == 0
    assert browser.run("window.broken") is None and browser.problems() == []


def test_the_policy_refuses_styles_scripts_and_requests_that_are_not_the_pages(
    browser, run, tmp_path
):
    opened(browser, tmp_path, run)
    browser.run(
        "document.head.append(Object.assign(document.createElement('style'), {textContent:"
        "'body { color: red }'}))"
    )
    assert browser.run("getComputedStyle(document.body).color") != "rgb(255, 0, 0)"
    assert browser.run("fetch('http://127.0.0.1:9/').then(() => true, () => false)") is False
    refused = "(() => { try { document.body.innerHTML = '<b>x</b>'; return false }"
    assert browser.run(f"{refused} catch (error) {{ return error instanceof TypeError }} }})()")
    refusals = " ".join(map(str, browser.problems()))
    assert "inline style" in refusals and "127.0.0.1:9" in refusals
    assert not any(url.startswith("http") for url in browser.requests())


def test_the_keyboard_reaches_charts_and_a_drag_looks_closer(browser, run, tmp_path):
    opened(browser, tmp_path, run)
    reached = []
    for _ in range(5):
        browser.press("Tab")
        reached.append(browser.run("document.activeElement.id"))
    assert reached[:3] == ["log-shown", "marks-shown", "plot-loss"]
    assert all(texts(browser, "figcaption")) and "at step 36" in browser.run(
        "document.querySelector('#plot-loss').getAttribute('aria-label')"
    )
    browser.run("document.querySelector('#plot-loss').focus()")
    for _ in range(3):
        browser.press("ArrowRight")
    browser.wait("document.querySelector('#plot-loss .u-legend').textContent.includes('step3')")
    x, y, width = browser.run(
        "(() => { const over = document.querySelector('#plot-loss .u-over');"
        "over.scrollIntoView({block: 'center'}); const box = over.getBoundingClientRect();"
        "return [box.x, box.y + box.height / 2, box.width]; })()"
    )
    for kind, at in (("Pressed", 0.5), ("Moved", 0.6), ("Moved", 0.75), ("Released", 0.75)):
        button = {"button": "left", "clickCount": 1} if kind != "Moved" else {"button": "left"}
        browser.call(
            "Input.dispatchMouseEvent", type=f"mouse{kind}", x=x + at * width, y=y, **button
        )
    browser.wait("zoom !== null")
    scales = browser.run(
        "charts.map((u) => [Math.round(u.scales.x.min), Math.round(u.scales.x.max)])"
    )
    assert scales == [[18, 27]] * len(scales)
    browser.click("#reset")
    assert browser.run("zoom") is None and browser.run("charts[0].scales.x.max") == 36


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_and_fits_a_phone(browser, run, tmp_path, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.call("Emulation.setEmulatedMedia", features=features)
    browser.call("Emulation.setDeviceMetricsOverride", **SIZE | {"width": 360})
    opened(browser, tmp_path, run)
    for selector in ("dd", "dd small", "figcaption span", "#marks li", "td", "pre"):
        assert browser.contrast(selector) >= 4.5, selector
    assert browser.run("document.documentElement.scrollWidth") <= 360
    browser.call("Emulation.setDeviceMetricsOverride", **SIZE)


def test_several_runs_are_drawn_together_with_what_differs(browser, run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    config = (other / "config.yml").read_text()
    (other / "config.yml").write_text(config.replace("value: 0.01", "value: 0.003"))
    versions = json.loads((other / "versions.json").read_text())
    (other / "versions.json").write_text(json.dumps(versions | {"jax": "0.1"}))
    opened(browser, tmp_path, run, other)
    table = texts(browser, "section[aria-label^='What differs'] td")
    assert table[:3] == ["optimizer.learning_rate.value", "0.01", "0.003"] and len(table) == 3
    (row,) = texts(browser, "section[aria-label=Versions] tr.differs")
    assert row == f"jax{versions['jax']}0.1"
    colors = browser.run("charts[0].series.slice(1).map((each) => each.stroke())")
    assert len({*colors}) == 2
    assert {"spiked", "other"} <= {*texts(browser, "thead th")}


@pytest.mark.slow
def test_a_running_job_is_followed_on_this_machine_alone(browser, run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "live")
    command = [sys.executable, "-m", "maxstack.cli", "report", str(folder), "--serve"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=processes.environment()
    )
    try:
        origin = process.stdout.readline().strip()
        browser.open(origin)
        browser.wait("charts.length > 0")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 37, "loss": 0.125, "grad_norm": 1.0}) + "\n")
        browser.wait("data.runs[0].step == 37 && document.body.textContent.includes('37')")
        asked = browser.requests()
        assert {url for url in asked if not url.startswith((f"{origin}/", "data:"))} == set()
        assert browser.problems() == []
        address = origin.removeprefix("http://")
        for path, host, code in (
            ("/data", address, 200),
            ("/data", address.replace("127.0.0.1", "localhost"), 200),
            ("/data", "rebound.example", 421),
            ("/../config.yml", address, 404),
            ("/config.yml", address, 404),
        ):
            connection = http.client.HTTPConnection(address)
            connection.request("GET", path, headers={"Host": host})
            answer = connection.getresponse()
            assert answer.status == code, (path, host)
            if code == 200:
                assert json.loads(answer.read())["runs"][0]["step"] == 37
                policy = answer.headers["Content-Security-Policy"]
                assert "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        browser.wait("document.querySelector('#live').textContent.startsWith('not connected')")
    finally:
        process.kill()


def data_of(folder):
    return Pages([folder]).data()["runs"][0]


def test_a_state_follows_from_the_ledger_and_the_log(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    assert data_of(folder)["state"] == "finished"
    ledger = folder / "goodput.jsonl"
    lines = ledger.read_text().splitlines()
    begin = {"event": "begin", "time": time.time() - 2, "boot": "", "monotonic": 0.0}
    ledger.write_text("\n".join([*lines, json.dumps(begin)]) + "\n")
    found = data_of(folder)
    assert found["state"] == "running" and found["left"] is not None
    ledger.write_text("\n".join([*lines, json.dumps(begin | {"time": time.time() - 20})]) + "\n")
    assert data_of(folder)["state"] == "killed"
    with (folder / "log.txt").open("a") as log:
        log.write("2026-01-01 00:00:01 ended by ConfigError: no room\n")
    found = data_of(folder)
    assert (found["state"], found["why"]) == ("failed", "ended by ConfigError: no room")


def test_what_is_missing_or_damaged_is_said(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "config.yml").write_text("{")
    assert data_of(folder)["remarks"] == [
        "config.yml cannot be read",
        "there is no metrics.jsonl: no step has been done",
    ]
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"st\n{"step": 2, "lo')
    found = data_of(folder)
    assert found["remarks"][1:] == ["damaged lines of metrics.jsonl, left out: 1"]
    assert (found["step"], found["state"], found["series"]["loss"]) == (1, "unknown", ([1], [0.5]))
    assert document.page(Pages([folder]).data()).count("<script") == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nowhere", "nowhere: no such folder"),
        (".", "not a run's folder"),
        ("run --out no/where.html", "the folder no does not exist"),
        ("run --serve --out x.html", "--serve writes no file"),
        ("run --serve --port 70000", "must be a number from 0 to 65535"),
    ],
)
def test_mistakes_are_one_sentence(words, said, tmp_path, monkeypatch, maxstack):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    error = maxstack(f"report {words}", code=1)
    assert said in error and error.count("\n") == 1


def test_pictures_that_are_none_or_lead_elsewhere_are_left_out(tmp_path):
    folder = tmp_path / "samples"
    folder.mkdir()
    (folder / "1.png").write_text("no picture")
    (tmp_path / "secret.png").write_bytes(run_data.PNG)
    (folder / "2.png").symlink_to(tmp_path / "secret.png")
    Image.new("L", (2, 2)).save(folder / "3.png")
    assert [name for name, _ in run_data.pictures(folder)] == ["3.png"]


@pytest.mark.slow
def test_the_vendored_files_are_those_that_their_page_names():
    page = document.policy(live=False)
    names = re.findall(r"^(\w{64})  (\S+)$", document.read("README.md"), re.M)
    assert len(names) == 2
    for digest, name in names:
        assert hashlib.sha256(document.read(name).encode()).hexdigest() == digest
        assert document.source(document.read(name)) in page
    assert "unsafe" not in page and "Leon Sorokin" in document.page({"runs": []})
