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

from maxstack import cli
from maxstack.errors import ConfigError
from maxstack.load import load
from maxstack.submit import records, remote

PAGE = Path(__file__).parents[2] / "docs" / "CLUSTER.md"
DOCUMENTED = [
    line.split("#")[0].split()[1:]
    for line in PAGE.read_text().splitlines()
    if line.startswith("maxstack submit synthetic") and "--dry-run" in line
]


@pytest.mark.parametrize("words", DOCUMENTED, ids=" ".join)
def test_documented_dry_runs_print_what_a_cluster_gets(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 0 and "maxstack train" in capsys.readouterr().out


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
    target, program, stop, tmp_path, monkeypatch, capfd
):
    path = write_config(tmp_path, train={"batch_size": 64, "steps": 10})
    facts = (
        {"topology": "h100:2x8"}
        | ({} if target == "slurm" else FACTS | {"context": "ctx"})
        | ({"namespace": "ns"} if target == "gke" else {})
    )
    (tmp_path / "cluster.yml").write_text(yaml.safe_dump(facts))
    programs = {name: NOTE for name in ("kubectl", "sbatch", "scancel", "squeue", "xpk")}
    (tmp_path / "bin").mkdir()
    for key, value in (
        stand_ins(tmp_path / "bin", programs)
        | {"NOTED": str(tmp_path / "noted"), "XDG_STATE_HOME": str(tmp_path / "state")}
    ).items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(tmp_path)
    (there := tmp_path / "noted.there").touch()
    options = f"--target {target} --cluster {tmp_path}/cluster.yml run.output_dir=/gcs/runs"
    words = ["submit", str(path), *options.split()]
    assert cli.main([*words, "--dry-run"]) == 0
    shown = capfd.readouterr().out
    assert (
        "100" in shown
        and cli.main([*words, "--dry-run", "--max-restarts", "7"]) == 0
        and "7" in set(re.findall(r"\d+", capfd.readouterr().out))
    )
    assert not (tmp_path / "noted").exists()
    assert cli.main(words) == 0
    first = (tmp_path / "noted").read_text().splitlines()
    assert Path(first[0]).name == program
    if target == "xpk":
        assert shown.split()[:3] == ["xpk", "workload", "create"] and first[1:3] == [
            "workload",
            "create",
        ]
    else:
        applied = ""
        if target == "gke":
            applied = (tmp_path / "noted.applied").read_text()
            key = yaml.safe_load(applied.split("---")[0])["stringData"]["key"]
            assert re.fullmatch("[0-9a-f]{64}", key) and key not in shown
            applied = applied.replace(key, "{key}") + "---\n"
        assert applied + (tmp_path / "noted.given").read_text() == shown
    there.write_text("77 run\n")
    for again in (words, ["submit", str(path), "--target", "local"], [*words, "--name", "other"]):
        assert cli.main(again) == 1
        said = (
            f"run: was submitted to {target} ({tmp_path}/cluster.yml, /gcs/runs/run), and is "
            "still there; maxstack stop run first"
        )
        assert said in capfd.readouterr().err
    there.unlink()
    assert (
        cli.main(words) == 1
        and "and it is not known whether it has ended: " in capfd.readouterr().err
    )
    there.touch()
    assert cli.main(words) == 0
    for verb in ("status", "stop"):
        (tmp_path / "noted").unlink()
        assert cli.main([verb, "run"]) == 0
    said = (tmp_path / "noted").read_text().split("\n")[:-1]
    assert [Path(word).name if word.startswith("/") else word for word in said] == stop.split()


def test_a_command_of_a_cluster_times_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", stand_ins(tmp_path / "bin", {"kubectl": "exec sleep 100"})["PATH"])
    monkeypatch.setattr(remote, "ANSWER", 0.2)
    records.folder().mkdir(parents=True)
    about = {"target": "gke", "cluster": "c", "topology": "t", "started": "s", "folder": "f"}
    asked = dict.fromkeys(("status", "there"), ["kubectl", "get", "it"])
    records.write("run", about | {"commands": asked})
    assert cli.main(["status"]) == 1
    assert "run: kubectl get it: no answer in 0 s; the cluster" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="kubectl get it: no answer in 0 s"):
        remote.check_ended("run", "f", "gke")


@pytest.mark.parametrize(
    ("target", "file"), [("gke", "jobset.yml"), ("slurm", "job.sbatch"), ("xpk", None)]
)
def test_out_writes_all_that_a_cluster_gets(target, file, tmp_path, monkeypatch, capsys):
    path = write_config(tmp_path, train={"batch_size": 64, "steps": 10})
    facts = {"topology": "h100:2x8"} | ({} if target == "slurm" else FACTS)
    (tmp_path / "cluster.yml").write_text(yaml.safe_dump(facts))
    options = f"--target {target} --cluster {tmp_path}/cluster.yml run.output_dir=/gcs/runs"
    words = ["submit", str(path), "--dry-run", *options.split()]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert cli.main([*words, "--out", str(out := tmp_path / "out")]) == 0
    assert {stat.S_IMODE(file.stat().st_mode) for file in out.iterdir()} == {0o600}
    files = {found.name: found.read_text() for found in out.iterdir()}
    assert {
        line.removeprefix("wrote ").split(":")[0] for line in capsys.readouterr().out.splitlines()
    } == {str(out / name) for name in files}
    assert (
        files.keys() - {"protection.yml"} == {"run.yml", "submit.sh", *filter(None, [file])}
        and "# stop: " in files["submit.sh"]
    )
    assert load(out / "run.yml") == load(path, ["run.output_dir=/gcs/runs", "faults.grace=540"])
    given = stand_ins(
        tmp_path / "bin",
        {
            "sbatch": 'cat "${@: -1}" > given',
            "kubectl": 'case "$*" in *apply*) cat >> given ;; *) cat "${@: -1}" >> given ;; esac',
        }
        | {"xpk": 'printf "%s\\n" "$@" > given'},
    )
    subprocess.run(["bash", "submit.sh"], cwd=out, env=os.environ | given, check=True)
    if file:
        first = files.get("protection.yml", "")
        assert first + "---\n" * (first > "") + files[file] == shown
        key = re.escape(first + files[file]).replace(re.escape("{key}"), "[0-9a-f]{64}")
        assert re.fullmatch(key, (out / "given").read_text())
    else:
        assert shlex.split(shown)[1:] == (out / "given").read_text().splitlines()
    assert (
        cli.main([*words, "--out", str(out)]) == 1 and f"{out}/run.yml" in capsys.readouterr().err
    )


def test_force_overrides_the_estimate(tmp_path, capsys):
    words = (
        "submit synthetic --target gke --cluster tpu-v5e --dry-run mesh.data=1 mesh.fsdp=-1 "
        "train.batch_size=64 model.embed=65536 model.layers=64 run.output_dir=/gcs/x "
        "checkpoint.every=10"
    ).split()
    assert (
        cli.main(words) == 1
        and "where maxstack plan says that it fits, --force" in capsys.readouterr().err
    )
    assert cli.main([*words, "--force"]) == 0


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
def test_mistakes_are_refused_before_submission(words, says, tmp_path, monkeypatch, capsys):
    path = write_config(tmp_path, train={"batch_size": 64, "steps": 10})
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", "/nonexistent")
    assert cli.main(["submit", str(path), *words.split()]) == 1
    assert says in capsys.readouterr().err


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
def test_restarts_from_step_0_are_refused_unless_wanted(
    target, words, says, tmp_path, monkeypatch, capsys
):
    path = write_config(tmp_path, train={"batch_size": 64, "steps": 10})
    (tmp_path / "cluster.yml").write_text(
        yaml.safe_dump({"topology": "h100:2x8"} | ({} if target == "slurm" else FACTS))
    )
    options = f"--target {target} --cluster {tmp_path}/cluster.yml run.output_dir=/gcs/runs"
    given = ["submit", str(path), "--dry-run", *options.split(), *words]
    assert cli.main(given) == 1 and says in capsys.readouterr().err
    assert cli.main([*given, "--max-restarts", "0"]) == 0
    assert cli.main([*given, "--set", "restart_from_zero=true"]) == int("restore" in says)
