"""Inputs too large for a process, a Kubernetes object or sbatch are refused before it is handed
over, and what is below the limit arrives."""

import dataclasses
import hashlib
import os
import re
import subprocess

import pytest
import yaml
from processes import stand_ins, write_config
from submit import jobs

from maxstack.errors import ConfigError
from maxstack.load import load
from maxstack.plan.topology import parse
from maxstack.schema.cluster import STRING
from maxstack.submit import gke, slurm, xpk
from maxstack.submit.job import SCRIPT, WRAPPER

MANY = 4000
TARGETS = {
    "gke": ("v5e:4x4", gke.manifest),
    "xpk": ("v5e:4x4", xpk.command),
    "slurm": ("h100:2x8", slurm.script),
}


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    return load(write_config(tmp_path_factory.mktemp("limits")), ["run.output_dir=/gcs/runs"])


def job(cfg, topology="v5e:4x4", sources=2, **facts):
    """A job of so many sources, each with a file of a name that does not compress to nothing."""
    text = cfg.data.sources[0]
    files = (hashlib.sha256(str(i).encode()).hexdigest()[:24] for i in range(sources))
    data = cfg.data.model_copy(
        update={
            "sources": tuple(
                text.model_copy(update={"files": (f"/gcs/data/{name}.txt",)}) for name in files
            )
        }
    )
    return jobs.job(cfg.model_copy(update={"data": data}), topology, **facts)


def padded(one, size):
    """The job, with a packed configuration of that many letters."""
    made = dataclasses.replace(one)
    made.__dict__["packed"] = "A" * size
    return made


def container(one):
    return jobs.template(yaml.safe_load(gke.manifest(one)))["spec"]["containers"][0]


def started(words, folder, **environment):
    """The file that `maxstack train` was given, by a shell with those words."""
    programs = {
        "maxstack": f'[ "$1" = config ] || cp "$2" {folder}/seen',
        "srun": 'while [ "$1" != maxstack ]; do shift; done; exec "$@"',
    }
    own = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "7"} | environment
    command = [word.replace("/tmp/run.yml", f"{folder}/run.yml") for word in words]
    done = subprocess.run(command, env=os.environ | stand_ins(folder, programs) | own, check=False)
    seen = folder / "seen"
    return done.returncode, seen.read_text() if seen.exists() else None


@pytest.mark.slow
def test_thousands_of_sources_reach_the_processes_of_every_target(cfg, tmp_path):
    many, few = job(cfg, sources=MANY), job(cfg, sources=MANY // 2)
    assert len(many.text) > 4 * STRING  # as it is, no process could be started with it
    given = {entry["name"]: entry["value"] for entry in container(many)["env"] if "value" in entry}
    assert started(container(many)["command"], tmp_path, **given) == (0, many.text)
    (tmp_path / "seen").unlink()
    command = xpk.command(few)[-1].removeprefix("--command=")
    assert started(["bash", "-c", command], tmp_path) == (0, few.text)
    gpus = dataclasses.replace(many, topology=parse("h100:2x8"))
    (tmp_path / "run.sbatch").write_text(slurm.script(gpus))
    assert started(["bash", str(tmp_path / "run.sbatch")], tmp_path) == (0, gpus.text)


def test_a_variable_at_the_limit_starts_a_process_and_a_byte_more_is_refused(cfg):
    name, one = "MAXSTACK_CONFIG", job(cfg)
    room = STRING - len(f"{name}=") - 1
    environment = container(padded(one, room))["env"]
    (value,) = (entry["value"] for entry in environment if entry["name"] == name)
    subprocess.run(["/bin/true"], env={name: value}, check=True)
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(["/bin/true"], env={name: f"{value}A"}, check=False)
    said = (
        r"^--target gke: MAXSTACK_CONFIG has 131,073 bytes, and the limit is 131,072 "
        r"\(the configuration is 131,056 of them, packed from .*--dry-run --out DIR "
        r"--set config=/PATH/a-run.yml"
    )
    with pytest.raises(ConfigError, match=said):
        gke.manifest(padded(one, room + 1))


def test_the_command_of_xpk_leaves_room_for_the_script_around_it(cfg):
    one = job(cfg)
    room = STRING - WRAPPER - len(xpk.command(padded(one, 0))[-1]) - 1
    assert len(xpk.command(padded(one, room))[-1]) == STRING - WRAPPER - 1
    with pytest.raises(
        ConfigError, match="--target xpk: --command has 126,977 bytes, and the limit is 126,976"
    ):
        xpk.command(padded(one, room + 1))


def test_a_script_and_an_object_that_no_cluster_stores_are_refused(cfg):
    gpus = job(cfg, "h100:2x8")
    room = SCRIPT - len(slurm.script(padded(gpus, 0)))
    assert len(slurm.script(padded(gpus, room))) == SCRIPT
    said = "--target slurm: the script has 4,194,305 bytes, and the limit is 4,194,304"
    with pytest.raises(ConfigError, match=said):
        slurm.script(padded(gpus, room + 1))
    facts = {f"S{i}": {"name": "n" * 200, "key": "k" * 200} for i in range(4000)}
    said = "the JobSet has 1,8.* bytes, and the limit is 1,441,792; shorten env and secrets"
    with pytest.raises(ConfigError, match=f"--target gke: {said}"):
        gke.manifest(job(cfg, secrets=facts))


def test_variables_that_no_process_can_be_given_are_refused():
    room = STRING - len("A=") - 1
    jobs.cluster(env={"A": "é" * (room // 2) + "a" * (room % 2)})
    with pytest.raises(ValueError, match=r"has 131,073 bytes with its name"):
        jobs.cluster(env={"A": "a" * (room + 1)})
    with pytest.raises(ValueError, match=r"1,048,576 is the most"):
        jobs.cluster(env={f"A{i}": "a" * 120_000 for i in range(9)})


@pytest.mark.parametrize("target", TARGETS)
def test_a_configuration_on_the_cluster_must_be_identical(target, cfg, tmp_path):
    topology, make = TARGETS[target]
    path = tmp_path / "there.yml"
    one = padded(job(cfg, topology, config=str(path)), SCRIPT)  # however large
    made = make(one)
    words = ["bash", "-c", made[-1].removeprefix("--command=") if target == "xpk" else made]
    words = container(one)["command"] if target == "gke" else words
    assert started(words, tmp_path) == (1, None)  # a mistake, which no restart mends
    path.write_text(f"{one.text}\n")
    assert started(words, tmp_path) == (1, None)
    path.write_text(one.text)
    assert started(words, tmp_path) == (0, one.text)
    name = re.escape(str(path))
    assert re.search(rf"maxstack train .*{name}|config={name}", words[-1])
