"""`rollout.sandbox`: what code of rewards and environments can neither see, reach nor use up."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
from rewards import captive as prisoner
from rewards.cases import awaited, case, ended, function

from maxstack import startup
from maxstack.errors import ConfigError
from maxstack.rewards import pool as pool_module
from maxstack.rewards import sandbox
from maxstack.schema.rewards import FunctionReward, RegexReward


def absent():
    """Why no sandbox can begin on this machine, whoever asks for it."""
    if not (program := shutil.which("bwrap")):
        return "bubblewrap is not installed: apt install bubblewrap"
    words = [program, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return f"bubblewrap cannot begin here: {done.stderr}" if done.returncode else ""


bubblewrap = pytest.mark.skipif(bool(absent()), reason=absent())


def captive(name, **keys):
    return FunctionReward(kind="function", call=f"rewards.captive:{name}", **keys)


@pytest.fixture
def confined(monkeypatch, pool):
    """What one reward of captive.py gives in a sandbox."""
    monkeypatch.setenv("HF_TOKEN", "swordfish")

    def ask(reward, completion="four", **row):
        rewards = pool(reward, function("good"), sandbox=sandbox.prefix())
        found, good = rewards.submit(case(completion, **row)).result(60)
        assert good == (float(len(completion)), {}, None)
        return found

    return ask


@bubblewrap
def test_the_network_is_not_reached(confined, pool):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as other:
        name = f"maxstack-{os.getpid()}"
        other.bind(f"\0{name}")
        other.listen()
        row = {"port": server.getsockname()[1], "name": name}
        assert confined(captive("reaches"), **row).value == 0.0
        assert pool(captive("reaches")).submit(case(**row)).result(60)[0].value == 2.0


@bubblewrap
def test_neither_environment_nor_home_nor_other_processes_are_seen(confined, tmp_path):
    (tmp_path / "key").write_text("swordfish")
    row = {
        "secret": "swordfish",
        "file": str(tmp_path / "key"),
        "home": str(Path.home() / ".cache"),
    }
    (Path.home() / ".cache").mkdir(exist_ok=True)
    found = confined(captive("looks"), **row)
    assert found.failure is None
    assert found.components == dict.fromkeys(("environment", "file", "home", "processes"), 0.0)


@bubblewrap
def test_a_program_in_it_takes_nothing_from_the_processes_around_it(confined):
    found = confined(captive("intrudes"))
    assert found.failure is None
    assert found.components == dict.fromkeys(("files", "memory", "descriptors", "traced"), 0.0)


@bubblewrap
def test_an_unasked_answer_fails_the_call(confined):
    assert "wrote to the socket of its worker" in confined(captive("forges")).failure


@bubblewrap
@pytest.mark.parametrize("lie", [{"value": float("inf")}, {"components": 5}, {"killed": True}])
def test_a_forged_answer_obeys_the_rules(lie, pool):
    (found,) = pool(captive("lies"), sandbox=sandbox.prefix()).submit(case(**lie)).result(60)
    if "killed" in lie:  # a name that an answer does not have
        assert found == (1000.0, {}, None)
    else:
        assert "wrote to the socket" in found.failure


@bubblewrap
def test_a_late_answer_answers_no_other_call(pool):
    rewards = pool(captive("adds"), sandbox=sandbox.prefix())
    for _ in range(2):
        assert rewards.submit(case()).result(60) == [(1.0, {}, None)]
        time.sleep(0.3)


@bubblewrap
def test_python_runs_nothing_that_an_earlier_call_planted(confined):
    assert confined(captive("plants")) == (0.0, {}, None)


@bubblewrap
def test_a_stop_of_its_worker_fails_the_call_in_time(confined, monkeypatch):
    monkeypatch.setattr(pool_module, "SILENCE", 2.0)
    monkeypatch.setattr(pool_module, "KILL_SECONDS", 0.1)
    assert "did not answer (TimeoutError" in confined(captive("stops")).failure


@bubblewrap
def test_a_long_call_is_no_silence(confined, monkeypatch):
    monkeypatch.setattr(pool_module, "SILENCE", 2.0)
    assert confined(captive("waits")) == (1.0, {}, None)


@bubblewrap
@pytest.mark.skipif(prisoner.session() < 0, reason="the kernel keeps no keys for this process")
def test_the_keys_of_the_session_are_left_behind(confined):
    assert confined(captive("session")).value not in (prisoner.session(), -1.0)


@bubblewrap
def test_nothing_is_written_outside_of_the_scratch(confined, tmp_path):
    found = confined(captive("writes"), folder=str(tmp_path))
    assert found.failure is None and len(found.components) == 8 and found.value == 0.0
    assert not [*tmp_path.iterdir()] and not Path("written").exists()


@bubblewrap
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fills", "OSError: full"),
        ("bombs", "had more than 64 processes"),
        ("shares", "took more than memory=0.3 GiB with all of them"),
    ],
)
def test_files_processes_and_memory_are_bounded(name, says, confined):
    assert says in confined(captive(name, memory=0.3, timeout=30)).failure


@bubblewrap
def test_rewards_are_those_without_a_sandbox(pool):
    rewards = [
        function("lucky"),
        function("crashes"),
        function("hangs", timeout=0.5),
        captive("begins"),
        RegexReward(kind="regex", pattern="2"),
    ]
    free, inside = (
        pool(*rewards, sandbox=words).submit(case("print(2 + 2.5)")).result(60)
        for words in ((), sandbox.prefix())
    )
    assert free == inside and free[3].value == 4.5


@bubblewrap
def test_a_sandbox_ends_with_whoever_began_it():
    code = (
        "from maxstack.rewards import pool, sandbox; from rewards.cases import case, function\n"
        "made = pool.Pool([function('hangs', timeout=600)], 1, sandbox.prefix())\n"
        "made.check(); made.submit(case())\n"
        "print(made._children[0]._process.pid, flush=True); import time; time.sleep(600)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    began = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env)
    inside = [int(began.stdout.readline())]
    with contextlib.suppress(OSError):
        for number in inside:
            text = Path(f"/proc/{number}/task/{number}/children").read_text()
            inside += map(int, text.split())
    assert len(inside) >= 3
    os.kill(began.pid, signal.SIGKILL)
    began.wait()
    began.stdout.close()
    assert awaited(lambda: all(map(ended, inside)))


def test_a_run_does_not_start_where_bubblewrap_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    cfg = tiny.with_rollouts(rollout={"sandbox": True})
    with contextlib.ExitStack() as ending:
        with pytest.raises(ConfigError, match=r"rollout\.sandbox: needs bubblewrap, .* apt "):
            startup.open_feed(SimpleNamespace(cfg=cfg), tmp_path, ending)


def test_a_sandbox_that_the_kernel_refuses_is_an_error(monkeypatch, tmp_path):
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2; exit 1")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match=r"^rollout\.sandbox: bwrap: setting up uid map"):
        sandbox.prefix()


@bubblewrap
def test_a_working_folder_around_the_home_is_refused(monkeypatch):
    monkeypatch.chdir("/")
    with pytest.raises(ConfigError, match=r"rollout\.sandbox: code is imported from /, "):
        sandbox.prefix()
