"""Objects for clusters: JobSets, sbatch scripts and xpk's command line, for any name and
value."""

import argparse
import base64
import dataclasses
import gzip
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import stand_ins, write_config
from submit.jobs import cluster, jobset, template

from maxstack import config
from maxstack.cluster.environment import PORT, member
from maxstack.config.compose import presets_dir
from maxstack.errors import ConfigError
from maxstack.load import load
from maxstack.plan.topology import parse
from maxstack.schema.cluster import ClusterConfig
from maxstack.schema.faults import ElasticConfig
from maxstack.submit import gke, slurm, xpk
from maxstack.submit.job import check_cluster, machines, make_job

OPTIONS = json.loads(Path(__file__).with_name("xpk-options.json").read_text())


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    folder = tmp_path_factory.mktemp("targets")
    return load(
        write_config(folder, train={"batch_size": 256, "steps": 10}),
        ["run.output_dir=/gcs/runs"],
    )


@pytest.fixture
def job(cfg):
    def make(topology: str, name: str = "a-run", **facts):
        slices = cfg.mesh.model_copy(update={"slices": parse(topology).slices})
        cut = cfg.model_copy(update={"mesh": slices})
        return make_job(name, cut, cluster(topology, **facts))[0]

    return make


def pod(tree):
    return template(tree)["spec"]


def environment_of(tree, index: int, completion: int) -> dict[str, str]:
    """Environment of a pod's processes."""
    fields = {gke.INDEX: str(index)}
    return {"JOB_COMPLETION_INDEX": str(completion)} | {
        entry["name"]: entry["value"].replace("$$", "$")
        if "value" in entry
        else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in pod(tree)["containers"][0]["env"]
        if "secretKeyRef" not in entry.get("valueFrom", {})
    }


@pytest.mark.parametrize(
    ("topology", "label", "limit", "each"),
    [
        (
            "v5e:4x4",
            {"tpu-accelerator": "tpu-v5-lite-podslice", "tpu-topology": "4x4"},
            {"google.com/tpu": 4},
            (1, 4),
        ),
        (
            "v5p:2x2x2*2",
            {"tpu-accelerator": "tpu-v5p-slice", "tpu-topology": "2x2x2"},
            {"google.com/tpu": 4},
            (2, 2),
        ),
        (
            "tpu7x:2x2x1",
            {"tpu-accelerator": "tpu7x", "tpu-topology": "2x2x1"},
            {"google.com/tpu": 4},
            (1, 1),
        ),
        ("h100:4x8", {"accelerator": "nvidia-h100-mega-80gb"}, {"nvidia.com/gpu": 8}, (1, 4)),
    ],
)
def test_a_jobset_requests_the_topology_and_numbers_its_pods(topology, label, limit, each, job):
    secret = {"HF_TOKEN": {"name": "s", "key": "k"}}
    one = job(topology, queue="q", reservation="mine", secrets=secret, service_account="me")
    tree = jobset(one)
    spec, (slices, hosts) = pod(tree), each
    chosen = {
        key.removeprefix("cloud.google.com/").removeprefix("gke-"): value
        for key, value in spec["nodeSelector"].items()
    }
    assert chosen == label | {"reservation-name": "mine"}
    assert limit.items() <= spec["containers"][0]["resources"]["limits"].items()
    assert spec["terminationGracePeriodSeconds"] == 600
    assert tree["spec"]["replicatedJobs"][0]["replicas"] == slices
    assert tree["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert ("annotations" in tree["metadata"]) == (one.tpu and hosts > 1)
    pods = itertools.product(range(slices), range(hosts))
    found = [member(environment_of(tree, *indices), on_tpu=False) for indices in pods]
    if slices * hosts == 1:
        assert found == [None]
    for number, one in enumerate(filter(None, found)):
        numbers = one.process, one.processes, one.coordinator
        assert numbers == (number, slices * hosts, f"a-run-w-0-0.a-run:{PORT}")


def test_a_jobset_fails_on_a_mistake_and_restarts_otherwise(job):
    tree = jobset(job("v5e:4x4", max_restarts=7))
    inner = tree["spec"]["replicatedJobs"][0]["template"]["spec"]
    codes = {"containerName": "train", "operator": "In", "values": [1, 2]}
    rules = [{"action": "FailJob", "onExitCodes": codes}]
    assert inner["podFailurePolicy"]["rules"] == rules
    assert inner["backoffLimit"] == 0 and pod(tree)["restartPolicy"] == "Never"
    rule = {"name": "mistakes", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    policy = tree["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 7 and policy["rules"] == [rule]


def recorded(name: str) -> argparse.ArgumentParser:
    """xpk's parser of a command, from the record of its options."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for option in OPTIONS[name]:
        more = {"action": "store_true"} if option["flag"] else {"choices": option["choices"]}
        more |= {"action": "append"} if option["append"] else {}
        parser.add_argument(*option["names"], required=option["required"], **more)
    return parser


def pathways(one, folder="/tmp/runs"):
    """The same run by one process."""
    run = one.cfg.run.model_copy(update={"output_dir": folder})
    faults = one.cfg.faults.model_copy(update={"elastic": ElasticConfig()})
    cfg = one.cfg.model_copy(update={"runtime": "pathways", "run": run, "faults": faults})
    cluster = one.cluster.model_copy(update={"bucket": None})
    return dataclasses.replace(one, cfg=cfg, cluster=cluster)


@pytest.mark.parametrize(
    ("topology", "kind"),
    [
        ("v5e:4x4", {"tpu_type": "v5litepod-4x4", "num_slices": "1"}),
        ("v5p:4x4x4*2", {"tpu_type": "v5p-4x4x4", "num_slices": "2"}),
        ("h200:4x8", {"device_type": "h200-141gb-8", "num_nodes": "4"}),
    ],
)
def test_xpk_takes_the_command_and_its_containers_the_configuration(topology, kind, job):
    one = job(topology, project="p", zone="z", env={"A": "b c"}, max_restarts=3)
    train = r"echo (\S+) \| base64 -d \| gunzip > /tmp/run.yml && exec maxstack train /tmp/run.yml"
    slices = str(one.topology.slices - 1)
    runs = [(one, "create", ["stored"], None, "")]
    if one.tpu:
        more = " --supervise --max-restarts 3"
        runs += [(pathways(one), "create-pathways", None, slices, more)]
    for made, wanted, storage, elastic, supervised in runs:
        program, area, verb, *words = xpk.command(made)
        assert verb == wanted
        found = vars(recorded(verb).parse_args(words))
        assert (found["storage"], found.get("elastic_slices")) == (storage, elastic)
        names = found["workload"], found["cluster"], found["project"]
        assert (program, area, *names) == ("xpk", "workload", "a-run", "c", "p")
        assert all(found.get(key, value) == value for key, value in kind.items())
        assert found["max_restarts"] == "3" and found["termination_grace_period_seconds"] == "600"
        assert found["env"] == ["A=b c"]
        assert found.get("restart_on_exit_codes", "42,70") == "42,70"
        packed = re.fullmatch(train + supervised, found["command"])[1]
        assert gzip.decompress(base64.b64decode(packed)).decode() == made.text


@pytest.mark.parametrize(
    ("topology", "facts", "says"),
    [
        ("v5e:4x4", {"env": {"A": 'a"b'}}, "env.A: xpk does not quote '\"'"),
        ("v5e:4x4", {"env": {"A": "a\x85b"}}, "env.A: xpk does not quote '\\x85'"),
        (
            "v5e:4x4",
            {"bucket": {"name": "b12"}},
            "run `xpk storage attach NAME --cluster=c --type=gcsfuse --bucket=b12 "
            "--mount-point=/gcs",
        ),
        (
            "v5e:4x4",
            {"bucket": {"name": "b12", "mount": "/other"}},
            "is lost with the container; give a folder in the bucket, /other",
        ),
        ("v5e:4x4", {"bucket": None}, "bucket: is missing in the cluster's file"),
        ("h100:4x4", {}, "xpk takes whole hosts of 8 GPUs"),
        ("v5e:4x4", {"image": None}, "image: is missing in the cluster's file"),
        ("a100-80:2x8", {}, "a100-80 has no name there; known are v4"),
    ],
)
def test_values_that_xpk_would_misread_are_refused(topology, facts, says, job):
    with pytest.raises(ConfigError, match=re.escape(says)):
        xpk.command(job(topology, **facts))


@pytest.mark.parametrize(
    ("topology", "name", "allowed"),
    [
        ("v5e:4x4", "tpu-v6e-slice", "tpu-v5-lite-podslice, tpu-v5-lite-device"),
        ("h100:2x8", "nvidia-h100", "nvidia-h100-mega-80gb, nvidia-h100-80gb"),
        ("h200:2x8", "tpu-v5-lite-podslice", "nvidia-h200-141gb"),
    ],
)
def test_an_accelerator_must_name_the_topologys_chip(topology, name, allowed, job):
    for right in allowed.split(", "):
        one = job(topology, accelerator=right)
        assert right in pod(jobset(one))["nodeSelector"].values()
    with pytest.raises(ConfigError, match=f"accelerator: got '{name}'; allowed: .*: {allowed};"):
        gke.manifest(job(topology, accelerator=name))


@pytest.mark.parametrize(
    ("topology", "folder", "env", "says"),
    [
        ("h200:4x8", "/tmp/x", {}, "Pathways runs on TPUs, not on h200"),
        ("v5e:4x4", "/tmp/../gcs/x", {}, "xpk mounts only /tmp of the head's host"),
        ("v5e:4x4", "/tmp/x", {"A": "b env: c"}, "env.A: with Pathways xpk reserves `env:`"),
    ],
)
def test_settings_that_pathways_lacks_are_refused(topology, folder, env, says, job):
    with pytest.raises(ConfigError, match=re.escape(says)):
        xpk.command(pathways(job(topology, env=env), folder))
    with pytest.raises(ConfigError, match="bucket: xpk mounts none with Pathways"):
        xpk.command(dataclasses.replace(pathways(one := job("v5e:4x4")), cluster=one.cluster))


def test_unused_keys_are_reported_and_essential_ones_refused(capsys):
    def check(target, **facts):
        facts = {"topology": "v5e:4x4", "image": "i"} | facts
        check_cluster(ClusterConfig.model_validate(facts), target)
        return capsys.readouterr().err

    said = check("xpk", queue="q", service_account="s")
    assert said == "xpk does not use queue, service_account\n"
    assert not check("gke", queue="q")
    for target, key, value in (
        ("xpk", "secrets", {"A": {"name": "n", "key": "k"}}),
        ("xpk", "accelerator", "a"),
        ("slurm", "bucket", {"name": "b12"}),
    ):
        with pytest.raises(ConfigError, match=f"{key}: --target {target} does not use it"):
            check(target, **{key: value})


@pytest.mark.parametrize("per_gpu", [False, True])
def test_an_sbatch_script_passes_bash_and_shellcheck(per_gpu, job, tmp_path):
    facts = {"partition": "p", "per_gpu": per_gpu, "setup": ["module load cuda"]}
    script = slurm.script(job("h200:4x8", slurm=facts, env={"A": "it's"}))
    path = tmp_path / "run.sbatch"
    path.write_text(script)
    checker = Path(sys.executable).parent / "shellcheck"  # the environment need not be activated
    for words in (["bash", "-n"], [checker]):
        subprocess.run([*words, path], check=True)
    given = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", script, re.M))
    counts = [given[key] for key in ("nodes", "ntasks-per-node", "gpus-per-node")]
    assert counts == ["4", "8" if per_gpu else "1", "8"]
    assert given["signal"] == "TERM@660" and given["partition"] == "p" and "requeue" in given
    rack = dataclasses.replace(job("h200:4x8"), topology=parse("gb200:1x72"))  # of hosts with 4
    said = "--nodes=18\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n"
    assert said in slurm.script(rack)


STUBS = {
    "srun": 'while [ "$1" != maxstack ]; do shift; done; exec "$@"',
    "maxstack": '[ "$1" = config ] && exit "${CHECKED:-0}"; cp "$2" "$OUT"; exit "$CODE"',
    "scontrol": 'echo "$*" >> "$OUT.requeued"',
}


@pytest.fixture
def sbatch(tmp_path):
    """Runs a script as Slurm does -> what it left with, and its error."""

    def run(one, programs=STUBS, **variables):
        own = {"OUT": f"{tmp_path}/out", "SLURM_SUBMIT_DIR": f"{tmp_path}", "SLURM_JOB_ID": "7"}
        environment = os.environ | stand_ins(tmp_path, programs) | own | variables
        words = ["bash", "-c", slurm.script(one)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr.strip()

    return run


@pytest.mark.parametrize(
    ("code", "restarts", "left", "again"),
    [
        (0, 0, 0, False),
        (1, 0, 1, False),
        (42, 0, 0, True),
        (137, 0, 0, True),
        (42, 3, 42, False),
        (127, 0, 127, False),
    ],
)
def test_the_exit_code_decides_about_requeueing(code, restarts, left, again, job, sbatch, tmp_path):
    one = job("h100:2x8", max_restarts=3)
    found, said = sbatch(one, CODE=str(code), SLURM_RESTART_COUNT=str(restarts))
    assert found == left, said
    assert (tmp_path / "out").read_text() == one.text
    assert (tmp_path / "out.requeued").exists() == again


@pytest.mark.parametrize(
    ("when", "left", "said"),
    [
        ("before", 0, "stopped before it was started again"),
        ("meanwhile", 0, "left with 42; stopped, not requeued"),
        ("mistake", 1, ""),
    ],
)
def test_a_stopped_or_mistaken_job_is_not_requeued(when, left, said, job, sbatch, tmp_path):
    stop = tmp_path / "a-run-7.stop"
    if when == "before":
        stop.touch()
    stopping = f'[ "$1" = train ] && touch {stop}; {STUBS["maxstack"]}'
    variables = {"CODE": "42", "CHECKED": "1" if when == "mistake" else "0"}
    found = sbatch(job("h100:2x8"), STUBS | {"maxstack": stopping}, **variables)
    assert found == (left, said) and not (tmp_path / "out.requeued").exists()
    assert (tmp_path / "out").exists() == (when == "meanwhile")


NASTY = st.text(st.sampled_from("a'\"$`;|&<>(){}[]*?!#~ \\\t-=:%@,é\u2028"), max_size=30)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40
)
@given(value=NASTY, line=NASTY)
@pytest.mark.slow
def test_no_value_becomes_shell_or_yaml(value, line, job, sbatch, tmp_path):
    one = job("h100:2x8", env={"A": value, "B": line})
    environment = environment_of(jobset(one), 0, 0)
    assert (environment["A"], environment["B"]) == (value, line)
    show = {"srun": f'printf "%s\\0%s" "$A" "$B" > {tmp_path}/seen'}
    assert sbatch(one, show)[0] == 0 and (tmp_path / "seen").read_text() == f"{value}\0{line}"
    try:  # xpk quotes nothing: what could be more than a value is refused
        words = xpk.command(job("v5e:4x4", env={"A": value}))
    except ConfigError:
        return
    ((name, _, text),) = (
        word.removeprefix("--env=").partition("=") for word in words if word.startswith("--env=")
    )
    entry = yaml.safe_load(f'- name: {name}\n  value: "{text}"')
    assert entry == [{"name": "A", "value": value}]


@pytest.mark.parametrize(
    "name", ["JAX_PROCESS_ID", "SLURM_PROCID", "MAXSTACK_CONFIG", "TPU_WORKER_ID"]
)
def test_variables_of_process_identity_are_refused(name):
    for key, value in (("env", "'0'"), ("secrets", "{name: n, key: k}")):
        said = rf"{key}\.{name}.* is how a process learns of the others"
        with pytest.raises(ConfigError, match=said):
            config.load(ClusterConfig, "tpu-v5e", [f"{key}={{{name}: {value}}}"])


def test_example_clusters_load():
    files = sorted((presets_dir() / "clusters").glob("*.yml"))
    assert len(files) >= 3
    for file in files:
        parse(config.load(ClusterConfig, file.stem).topology)
    assert {row["xpk"] for row in machines().values()} <= OPTIONS["devices"].keys()
    flat, deep = (
        dict.fromkeys(("v5e", "v6e"), "2x2"),
        dict.fromkeys(("v4", "v5p", "tpu7x"), "2x2x1"),
    )
    for name in machines():
        assert parse(f"{name}:{(flat | deep).get(name, '1x8')}").chip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("image", "a;rm"),
        ("image", "a/b@sha256:123"),
        ("project", "$(x)"),
        ("env", {"A": "b\nc"}),
        ("slurm", {"partition": "a b"}),
        ("bucket", {"name": "gs://b"}),
    ],
)
def test_unsafe_values_are_refused(key, value):
    with pytest.raises(ValueError, match=key):
        cluster(**{key: value})


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        (0, 0),
        ("12:30", 750),
        ("1-02:03:04", 93784),
    ],
)
def test_time_limits_of_slurm_are_parsed(time, seconds):
    facts = {"topology": "h100:1x8", "slurm": {"time": time}}
    assert cluster(**facts, grace=30).slurm.seconds == seconds
    if 0 < seconds <= 3660:
        said = f"{time} is {seconds} s, and the run would be asked to save 3660 s before its end"
        with pytest.raises(ValueError, match=said):
            cluster(**facts, grace=3600)
