"""`maxstack submit` to a cluster: its own commands, stand-ins that note what they are given, and
what is refused before they are asked."""

import os
import re
import shlex
import stat
import subprocess
from pathlib import Path

import pytest
import yaml
from processes import stand_ins, write_config
from submit.jobs import FACTS

from maxstack.errors import ConfigError
from maxstack.load import load
from maxstack.submit import records, remote

PAGE = Path(__file__).parents[2] / "docs" / "CLUSTER.md"
DOCUMENTED = [
    line.split("#")[0].removeprefix("maxstack ")
    for line in PAGE.read_text().splitlines()
    if line.startswith("maxstack submit synthetic") and "--dry-run" in line
]


@pytest.mark.parametrize("words", DOCUMENTED)
def test_documented_dry_runs_print_what_a_cluster_gets(words, tmp_path, monkeypatch, maxstack):
    monkeypatch.chdir(tmp_path)
    assert "maxstack train" in maxstack(words)


def written(folder, target, **facts):
    """The options of a submission with a cluster's file."""
    known = {} if target == "slurm" else FACTS
    path = folder / "cluster.yml"
    path.write_text(yaml.safe_dump({"topology": "h100:2x8"} | known | facts))
    return f"--target {target} --cluster {path} run.output_dir=/gcs/runs"


NOTE = (
    'printf "%s\\n" "$0" "$@" >> "$NOTED"; to=given; [[ "$*" == *apply* ]] && to=applied; '
    '[ -t 0 ] || cat > "$NOTED.$to"; '
    'case "$*" in *parsable*) echo "77;c" ;; *noheader*|*ignore*) cat "$NOTED.there" ;; esac'
)


@pytest.mark.parametrize(
    ("target", "program", "stop"),
    [
        (
            "gke",
            "kubectl",
            "kubectl --context=ctx --namespace=ns delete jobset/run --cascade=foreground "
            "secret/run-job networkpolicy/run-job --ignore-not-found",
        ),
        ("slurm", "sbatch", "scancel --state=PENDING 77 scancel --signal=TERM --state=RUNNING 77"),
        (
            "xpk",
            "xpk",
            "xpk workload delete --workload=run --cluster=c --namespace=default --force",
        ),
    ],
)
def test_a_clusters_commands_submit_and_later_stop_a_run(
    target, program, stop, tmp_path, monkeypatch, maxstack
):
    path = write_config(tmp_path, train={"batch_size": 64, "steps": 10})
    facts = {} if target == "slurm" else {"context": "ctx"}
    options = written(tmp_path, target, **facts | ({"namespace": "ns"} if target == "gke" else {}))
    programs = dict.fromkeys(("kubectl", "sbatch", "scancel", "squeue", "xpk"), NOTE)
    own = stand_ins(tmp_path / "bin", programs)
    noted = tmp_path / "noted"
    own |= {"NOTED": str(noted), "XDG_STATE_HOME": str(tmp_path / "state")}
    for key, value in own.items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(tmp_path)
    (there := tmp_path / "noted.there").touch()
    words = f"submit {path} {options}"
    shown = maxstack(f"{words} --dry-run")
    assert "100" in shown
    assert "7" in re.findall(r"\d+", maxstack(f"{words} --dry-run --max-restarts 7"))
    assert not noted.exists()
    maxstack(words)
    first = noted.read_text().splitlines()
    assert Path(first[0]).name == program
    if target == "xpk":
        assert shown.split()[:3] == ["xpk", *first[1:3]] == ["xpk", "workload", "create"]
    else:
        applied = ""
        if target == "gke":
            applied = (tmp_path / "noted.applied").read_text()
            key = yaml.safe_load(applied.split("---")[0])["stringData"]["key"]
            assert re.fullmatch("[0-9a-f]{64}", key) and key not in shown
            applied = applied.replace(key, "{key}") + "---\n"
        assert applied + (tmp_path / "noted.given").read_text() == shown
    there.write_text("77 run\n")
    said = (
        f"run: was submitted to {target} ({tmp_path}/cluster.yml, /gcs/runs/run), and is "
        "still there; maxstack stop run first"
    )
    for again in (words, f"submit {path} --target local", f"{words} --name other"):
        assert said in maxstack(again, code=1)
    there.unlink()
    assert "and it is not known whether it has ended: " in maxstack(words, code=1)
    there.touch()
    for command in (words, "status run", "stop run"):
        noted.unlink()
        maxstack(command)
    said = noted.read_text().split("\n")[:-1]
    assert [Path(word).name if word.startswith("/") else word for word in said] == stop.split()


def test_a_command_of_a_cluster_times_out(tmp_path, monkeypatch, maxstack):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", stand_ins(tmp_path / "bin", {"kubectl": "exec sleep 100"})["PATH"])
    monkeypatch.setattr(remote, "ANSWER", 0.2)
    records.folder().mkdir(parents=True)
    about = {"target": "gke", "cluster": "c", "topology": "t", "started": "s", "folder": "f"}
    asked = dict.fromkeys(("status", "there"), ["kubectl", "get", "it"])
    records.write("run", about | {"commands": asked})
    assert "run: kubectl get it: no answer in 0 s; the cluster" in maxstack("status", code=1)
    with pytest.raises(ConfigError, match="kubectl get it: no answer in 0 s"):
        remote.check_ended("run", "f", "gke")


@pytest.mark.parametrize(
    ("target", "file"), [("gke", "jobset.yml"), ("slurm", "job.sbatch"), ("xpk", None)]
)
def test_out_writes_all_that_a_cluster_gets(target, file, tmp_path, maxstack):
    path = write_config(tmp_path, train={"batch_size": 64, "steps": 10})
    words, out = f"submit {path} --dry-run {written(tmp_path, target)}", tmp_path / "out"
    shown = maxstack(words)
    said = maxstack(f"{words} --out {out}").splitlines()
    assert {stat.S_IMODE(file.stat().st_mode) for file in out.iterdir()} == {0o600}
    files = {found.name: found.read_text() for found in out.iterdir()}
    assert {line.removeprefix("wrote ").split(":")[0] for line in said} == {
        str(out / name) for name in files
    }
    assert files.keys() - {"protection.yml"} == {"run.yml", "submit.sh", *filter(None, [file])}
    assert "# stop: " in files["submit.sh"]
    assert load(out / "run.yml") == load(path, ["run.output_dir=/gcs/runs", "faults.grace=540"])
    programs = {
        "sbatch": 'cat "${@: -1}" > given',
        "kubectl": 'case "$*" in *apply*) cat >> given ;; *) cat "${@: -1}" >> given ;; esac',
        "xpk": 'printf "%s\\n" "$@" > given',
    }
    given = stand_ins(tmp_path / "bin", programs)
    subprocess.run(["bash", "submit.sh"], cwd=out, env=os.environ | given, check=True)
    if file:
        first = files.get("protection.yml", "")
        assert first + "---\n" * (first > "") + files[file] == shown
        key = re.escape(first + files[file]).replace(re.escape("{key}"), "[0-9a-f]{64}")
        assert re.fullmatch(key, (out / "given").read_text())
    else:
        assert shlex.split(shown)[1:] == (out / "given").read_text().splitlines()
    assert f"{out}/run.yml" in maxstack(f"{words} --out {out}", code=1)


def test_force_overrides_the_estimate(maxstack):
    words = (
        "submit synthetic --target gke --cluster tpu-v5e --dry-run mesh.data=1 mesh.fsdp=-1 "
        "train.batch_size=64 model.embed=65536 model.layers=64 run.output_dir=/gcs/x "
        "checkpoint.every=10"
    )
    assert "where maxstack plan says that it fits, --force" in maxstack(words, code=1)
    maxstack(f"{words} --force")


GKE = "--target gke --cluster tpu-v5e"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--target gke", "give --cluster FILE"),
        (
            f"{GKE} mesh.data=8",
            "mesh: data=8 is 8 devices, but v5e:8x8 has 64; set one axis to -1",
        ),
        ("--target slurm --cluster slurm-h200 --set topology=v5e:8x8", "has TPUs"),
        (f"{GKE} run.virtual_devices=8", "is for a CPU"),
        (
            f"{GKE} run.output_dir=/gcs/../tmp",
            "is lost with the container",
        ),
        (
            f"{GKE} --set topology=v5e:8x8*2",
            "mesh.slices=1: but v5e:8x8*2 has 2",
        ),
        (
            f"{GKE} --set topology=v5e:8x8*2 mesh.slices=2 faults.elastic={{}}",
            "faults.elastic: is for one process that drives all slices, and runtime=jax",
        ),
        (f"{GKE} --processes 2", "are for --target local"),
        ("--target local --cluster tpu-v5e", "have no use with --target local"),
        (
            f"{GKE} runtime=pathways",
            "needs --target xpk, which starts its proxy and servers",
        ),
        (
            f"{GKE} --set topology=here",
            "topology: here is this machine; give the cluster's",
        ),
        (
            f"{GKE} run.output_dir=/gcs/x",
            "kubectl is not installed here",
        ),
    ],
)
def test_mistakes_are_refused_before_submission(words, says, tmp_path, monkeypatch, maxstack):
    path = write_config(tmp_path, train={"batch_size": 64, "steps": 10})
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", "/nonexistent")
    assert says in maxstack(f"submit {path} {words}", code=1)


ZERO = "checkpoint: saves nothing that a restart finds before train.steps=10 ("
TIER = "checkpoint.tiers=[{path: %s, every: 2%s}]"


@pytest.mark.parametrize(
    ("target", "words", "says"),
    [
        ("gke", ["checkpoint.every=0"], f"{ZERO}no folder that all hosts see), so each of max"),
        ("gke", ["checkpoint.every=0", TIER % ("/ssd", "")], f"{ZERO}/ssd every 2 steps"),
        ("slurm", ["checkpoint.every=0", TIER % ("/gcs/t", ", replicate: 1")], f"{ZERO}no folder"),
        ("slurm", ["run.output_dir=/tmp/../tmp/runs"], f"{ZERO}/tmp/../tmp/runs every 4 steps)"),
        ("xpk", ["checkpoint.every=10"], f"{ZERO}/gcs/runs every 10 steps)"),
        ("gke", ["checkpoint.restore=none"], "checkpoint.restore=none: would refuse a restart"),
    ],
)
def test_restarts_from_step_0_are_refused_unless_wanted(target, words, says, tmp_path, maxstack):
    path = write_config(tmp_path, train={"batch_size": 64, "steps": 10})
    given = f"submit {path} --dry-run {written(tmp_path, target)}"
    assert says in maxstack(given, *words, code=1)
    maxstack(given, *words, "--max-restarts", "0")
    wanted = "--set", "restart_from_zero=true"
    maxstack(given, *words, *wanted, code=int("restore" in says))
