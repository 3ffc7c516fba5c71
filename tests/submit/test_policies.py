"""Cluster policies that a JobSet's pods satisfy: security, resources, volumes, names."""

import copy

import pytest
from pod_security import violations
from processes import write_config
from submit.jobs import cluster, job, jobset, template

from maxstack import cli
from maxstack.errors import ConfigError
from maxstack.load import load
from maxstack.schema.cluster import BucketConfig
from maxstack.submit import gke, slurm, xpk


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    path = write_config(tmp_path_factory.mktemp("policies"), train={"batch_size": 64})
    return load(path, ["run.output_dir=/gcs/runs"])


def spec_of(one):
    return template(jobset(one))["spec"]


EVERYTHING = {
    "volumes": [
        {"mount": "/data", "claim": "c", "read_only": True},
        {"mount": "/certs", "config_map": "m"},
        {"mount": "/keys", "secret": "s"},
        {"mount": "/scratch", "size": "1Ti"},
    ]
}


@pytest.mark.parametrize("topology", ["v5e:4x4", "h100:2x8"])
@pytest.mark.parametrize("facts", [{}, EVERYTHING])
def test_pods_satisfy_the_restricted_standard(topology, facts, cfg):
    spec = spec_of(job(cfg, topology, **facts))
    assert violations(spec) == set() and spec["automountServiceAccountToken"] is False


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda spec: spec.update(hostNetwork=True), "hostNetwork"),
        (
            lambda spec: spec["volumes"].append({"name": "v", "hostPath": {"path": "/"}}),
            "volume hostPath",
        ),
        (lambda spec: spec["securityContext"].update(runAsNonRoot=None), "runAsNonRoot"),
        (lambda spec: spec["securityContext"].pop("seccompProfile"), "seccompProfile"),
        (
            lambda spec: spec["containers"][0]["securityContext"].pop("capabilities"),
            "capabilities.drop",
        ),
        (
            lambda spec: spec["containers"][0]["securityContext"].pop("allowPrivilegeEscalation"),
            "allowPrivilegeEscalation",
        ),
    ],
)
def test_the_standards_checker_finds_violations(change, found, cfg):
    spec = copy.deepcopy(spec_of(job(cfg)))
    change(spec)
    assert violations(spec) == {found}


def test_the_bucket_belongs_to_the_user_of_the_pods(cfg):
    spec = spec_of(job(cfg, pod={"user": 1234}))
    (bucket,) = (volume["csi"] for volume in spec["volumes"] if "csi" in volume)
    options = bucket["volumeAttributes"]["mountOptions"].split(",")
    assert {"uid=1234", "gid=1234", "file-mode=664", "dir-mode=775"} <= {*options}
    owners = {key: 1234 for key in ("runAsUser", "runAsGroup", "fsGroup")}
    assert owners.items() <= spec["securityContext"].items()


@pytest.mark.parametrize(
    ("topology", "cpu", "memory"), [("v5e:4x4", "72", "144Gi"), ("h100:2x8", "156", "1404Gi")]
)
def test_requests_of_a_pod_equal_its_limits(topology, cpu, memory, cfg):
    given = {"cpu": 8, "memory": "1500Mi"}
    found, own = (
        spec_of(job(cfg, topology, pod=pod))["containers"][0]["resources"] for pod in ({}, given)
    )
    limits = found["limits"]
    assert limits == found["requests"] and (limits["cpu"], limits["memory"]) == (cpu, memory)
    assert own["limits"] == own["requests"] == limits | {"cpu": "8", "memory": "1500Mi"}
    said = "pod.cpu: no machine with a100-80 is known here; give pod.cpu and pod.memory"
    with pytest.raises(ConfigError, match=said):
        gke.manifest(job(cfg, "a100-80:2x8", accelerator="nvidia-a100-80gb"))


def test_shared_memory_and_the_sidecar_have_limits(cfg):
    facts = {"shared_memory": "2Gi", "sidecar": {"cpu": "500m", "memory": 0}}
    found = template(jobset(job(cfg, pod=facts)))
    shared = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}
    assert shared in found["spec"]["volumes"]
    annotations = found["metadata"]["annotations"].items()
    assert {key: value for key, value in annotations if "limit" in key} == {
        "gke-gcsfuse/cpu-limit": "500m",
        "gke-gcsfuse/memory-limit": "0",
        "gke-gcsfuse/ephemeral-storage-limit": "30Gi",
    }


def test_a_jobset_has_a_ttl_and_the_labels_of_its_pods(cfg):
    own = {"team": "llm", "example.com/cost": "a1"}
    one = job(cfg, pod={"labels": own}, queue="q", ttl_seconds_after_finished=60)
    tree = jobset(one)
    assert tree["spec"]["ttlSecondsAfterFinished"] == 60
    assert "--ttl-seconds-after-finished=60" in xpk.command(one)
    labels = template(tree)["metadata"]["labels"]
    assert tree["metadata"]["labels"] == labels | {"kueue.x-k8s.io/queue-name": "q"}
    assert (own | {"app.kubernetes.io/instance": "a-run"}).items() <= labels.items()


def test_volumes_are_mounted_and_a_claim_may_hold_the_run(cfg):
    spec = spec_of(job(cfg, **EVERYTHING))
    volumes = {volume.pop("name"): volume for volume in spec["volumes"]}
    mounts = {mount.pop("mountPath"): mount for mount in spec["containers"][0]["volumeMounts"]}
    assert mounts["/data"]["readOnly"] and volumes[mounts["/data"]["name"]] == {
        "persistentVolumeClaim": {"claimName": "c"}
    }
    assert volumes[mounts["/certs"]["name"]] == {"configMap": {"name": "m"}}
    assert volumes[mounts["/keys"]["name"]] == {"secret": {"secretName": "s"}}
    assert volumes[mounts["/scratch"]["name"]] == {"emptyDir": {"sizeLimit": "1Ti"}}
    claim = {"mount": "/gcs", "claim": "filestore"}
    found = template(jobset(job(cfg, bucket=None, volumes=[claim])))
    assert "annotations" not in found["metadata"] and "csi" not in str(found["spec"]["volumes"])
    for lost in ({"size": "1Ti"}, {"claim": "c", "read_only": True}):
        facts = {
            "bucket": {"name": "bucket", "mount": "/b"},
            "volumes": [{"mount": "/gcs", **lost}],
        }
        with pytest.raises(ConfigError, match="is lost with the container"):
            gke.manifest(job(cfg, **facts))


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (
            {"volumes": [{"mount": "/data"}]},
            "/data has nothing to mount; give one of claim, config_map, secret, size",
        ),
        (
            {"volumes": [{"mount": "/data", "claim": "c", "size": "1Gi"}]},
            "/data has claim and size; give one of",
        ),
        ({"volumes": [{"mount": "/gcs/", "claim": "c"}]}, "/gcs: mounted twice"),
        (
            {"volumes": [{"mount": "/etc/ssl", "config_map": "c"}]},
            "/etc/ssl is a folder that the image or the system needs",
        ),
        (
            {"pod": {"labels": {"kueue.x-k8s.io/queue-name": "q"}}},
            "written by submit or by the cluster's controllers",
        ),
        ({"pod": {"labels": {"team": "a" * 64}}}, "at most 63"),
        ({"pod": {"memory": "16GB"}}, "pattern"),
        ({"pod": {"user": 0}}, "greater than or equal to 1"),
    ],
)
def test_invalid_volumes_and_pods_are_refused(facts, says):
    with pytest.raises(ValueError, match=says):
        cluster(**facts)


@pytest.mark.parametrize(
    "mount",
    ["/", "/.", "//etc", "/gcs/../usr", "/usr/local", "/var/run/secrets", "/root/x", "/home"],
)
def test_a_bucket_does_not_hide_a_folder_of_the_system(mount):
    with pytest.raises(ValueError, match="is a folder that the image or the system needs|has `..`"):
        BucketConfig(name="bucket", mount=mount)


@pytest.mark.parametrize(
    ("mount", "plain"),
    [
        ("/gcs/.", "/gcs"),
        ("/var/data", "/var/data"),
        ("/home/me/gcs", "/home/me/gcs"),
    ],
)
def test_a_bucket_is_mounted_in_any_other_folder(mount, plain):
    assert BucketConfig(name="bucket", mount=mount).mount == plain


def test_slurm_gets_memory_and_cpus(cfg):
    script = slurm.script(job(cfg, "h100:2x8"))
    assert "#SBATCH --mem=0\n" in script and "cpus-per-task" not in script
    script = slurm.script(job(cfg, "h100:2x8", slurm={"mem": "900G", "cpus_per_task": 12}))
    assert "#SBATCH --mem=900G\n" in script and "#SBATCH --cpus-per-task=12\n" in script
    assert "--kill-on-bad-exit=0 --cpus-per-task=12 maxstack train" in script


@pytest.mark.parametrize(
    ("words", "says", "not_said"),
    [
        ("", "run.compilation_cache=/gcs/.cache/maxstack/xla: the default is lost", "nothing"),
        ("", "maxstack:latest has no digest", "nothing"),
        (f"--set image=a/b@sha256:{'0' * 64}", "", "digest"),
        ("--max-restarts 0", "", "digest"),
        ("run.compilation_cache=/gcs/xla", "", "compilation_cache"),
        ("run.compilation_cache=null", "", "compilation_cache"),
    ],
)
def test_an_image_tag_and_a_moved_cache_are_reported(words, says, not_said, capsys):
    line = (
        "submit synthetic checkpoint.every=100 mesh.data=1 mesh.fsdp=-1 train.batch_size=64 "
        f"run.output_dir=/gcs/runs --target gke --cluster tpu-v5e --dry-run {words}"
    )
    assert cli.main(line.split()) == 0
    told = capsys.readouterr().err
    assert says in told and not_said not in told
