"""`runtime: pathways`, up to the client: what is missing is told, and the client is made before any
device is touched."""

import contextlib
import os
import socket
import subprocess
import sys

import pytest
from processes import write_config

from maxstack.cluster import pathways
from maxstack.errors import ConfigError
from maxstack.load import load

STAND_IN = """
import os, sys
def initialize():
    import jax
    from jax._src import xla_bridge
    print("asked", os.environ["JAX_PLATFORMS"], jax.config.jax_platforms, xla_bridge.backends_are_initialized())
    sys.exit(7)
"""  # noqa: E501


def train(path, target, folder):
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("JAX_PLATFORMS", "XLA_FLAGS", pathways.TARGET)
    }
    (folder / "pathwaysutils.py").write_text(STAND_IN)
    own = {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"} | (
        {pathways.TARGET: target} if target else {}
    )
    return subprocess.run(
        [sys.executable, "-m", "maxstack.train", str(path), "runtime=pathways"],
        env=environment | own,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_the_client_is_made_before_any_device_is_touched(tmp_path):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as proxy:
        done = train(write_config(tmp_path), f"grpc://127.0.0.1:{proxy.getsockname()[1]}", tmp_path)
    assert (done.returncode, done.stdout) == (7, "asked proxy proxy False\n"), done.stderr


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (None, "JAX_BACKEND_TARGET is not set; give the proxy's, such as"),
        ("here:29000", "JAX_BACKEND_TARGET='here:29000' is no such address"),
    ],
)
@pytest.mark.slow
def test_a_missing_proxy_address_is_an_error(target, says, tmp_path):
    done = train(write_config(tmp_path), target, tmp_path)
    assert (
        done.returncode == 1
        and f"error: runtime: pathways: {says}" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_a_proxy_that_does_not_answer_ends_the_process_in_time(monkeypatch):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv(pathways.TARGET, f"grpc://127.0.0.1:{port}")
    monkeypatch.setattr(pathways, "WAIT", 0.5)
    monkeypatch.setattr(pathways.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(
        pathways.Missing,
        match=rf"no proxy answers at 127.0.0.1:{port} \(Connection refused\) in 0 s; check",
    ) as caught:
        pathways.initialize()
    assert caught.value.exit_code == 42


def test_virtual_devices_are_refused_with_pathways(tmp_path):
    with pytest.raises(
        ConfigError,
        match="runtime: pathways is one process over devices elsewhere; leave out "
        "run.virtual_devices",
    ):
        load(write_config(tmp_path), ["runtime=pathways", "run.virtual_devices=8"])
