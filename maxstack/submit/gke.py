"""A JobSet for GKE: a job per slice, a pod per host. It is restarted as a whole after any exit code
but 0 and those of a user's mistake (1, 2), since one process alone cannot go on.

The JobSet holds the run's configuration, packed into a variable. Beside it a Secret with the job's
key and a NetworkPolicy are applied first. Nothing has run on a cluster: the trees are checked
against JobSet's schema and the `restricted` Pod Security Standard.
"""

import json
from collections.abc import Mapping
from typing import Any

import yaml

from maxstack.cluster.job_key import VARIABLE
from maxstack.cluster.membership import WAIT
from maxstack.errors import ConfigError, quoted
from maxstack.schema.cluster import STRING, SidecarConfig
from maxstack.submit.job import (
    KEY,
    OBJECT,
    Job,
    Placement,
    Submission,
    check_size,
    machine,
    machines,
)

TEXT = "MAXSTACK_CONFIG"
WORKERS = "w"
CONTAINER = "train"
MISTAKES = [1, 2]
PATIENCE = 3600
"""Seconds that a pod waits for the others, whose nodes may still be starting."""
HOME = "/tmp"
"""A folder that a user without an entry in the image's /etc/passwd can write."""
INDEX = "metadata.annotations['jobset.sigs.k8s.io/job-index']"


def submission(job: Job) -> Submission:
    """Return the commands of kubectl."""
    words = kubectl(job)
    later = {
        "status": [*words, "get", "jobset", job.name],
        "stop": [*words, "delete", f"jobset/{job.name}", "--cascade=foreground"],
    }
    before = None
    if VARIABLE not in job.cluster.secrets:
        # Applied before the JobSet, whose pods need the key; server-side, since client-side apply
        # keeps a copy of the Secret in an annotation.
        before = [*words, "apply", "--server-side", "--filename", "-"], protection(job)
        own = [f"secret/{job.name}-job", f"networkpolicy/{job.name}-job"]
        later["stop"] += [*own, "--ignore-not-found"]
    return Submission(
        # `create`, which refuses a name that exists: `apply` would change a running job. One
        # object, since kubectl goes on after an error and would leave the first of two.
        [*words, "create", "--filename", "-"],
        manifest(job),
        monitor_commands(job, ["--container", CONTAINER], job.topology.hosts) | later,
        before,
    )


def protection(job: Job) -> str:
    """Return the YAML of a Secret with the job's key, and of a NetworkPolicy that lets its pods
    reach each other only: jax's own port asks for no key."""
    metadata = {
        "name": f"{job.name}-job",
        "namespace": job.cluster.namespace,
        "labels": labels(job),
    }
    # Two equal mappings, not one twice, which YAML would write as an alias.
    pods = [{"matchLabels": {"jobset.sigs.k8s.io/jobset-name": job.name}} for _ in range(2)]
    policy = {
        "podSelector": pods[0],
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": pods[1]}]}],
    }
    trees = [
        {"apiVersion": "v1", "kind": "Secret", "stringData": {"key": KEY}},
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "spec": policy},
    ]
    return "---\n".join(yaml.safe_dump(tree | {"metadata": metadata}) for tree in trees)


def monitor_commands(job: Job, containers: list[str], streams: int) -> dict[str, list[str]]:
    """Return the commands of kubectl that look after a JobSet. `streams`: containers whose logs are
    followed."""
    words = kubectl(job)
    jobset = f"jobset.sigs.k8s.io/jobset-name={job.name}"
    logs = [*words, "logs", "--selector", jobset, *containers, "--prefix", "--tail=-1"]
    logs.append(f"--max-log-requests={streams}")
    return {
        "there": [*words, "get", "jobset", job.name, "--ignore-not-found", "--output=name"],
        "logs": logs,
        "follow": [*logs, "--follow"],
    }


def kubectl(job: Placement) -> list[str]:
    """Return kubectl with the cluster's context and namespace."""
    context = [f"--context={job.cluster.context}"] if job.cluster.context else []
    return ["kubectl", *context, f"--namespace={job.cluster.namespace}"]


def manifest(job: Job) -> str:
    """Return the YAML of the JobSet, with the run's configuration packed into it."""
    tree = jobset(job)
    # As etcd stores it, which bounds its size.
    stored = json.dumps(tree, ensure_ascii=False, separators=(",", ":"))
    check_size(job, "gke", "the JobSet", stored, OBJECT)
    return yaml.safe_dump(tree, sort_keys=False, width=10**6)


def command(job: Job) -> str:
    """Return the command of a container.

    Linux shields a container's first process from SIGKILL by others. That is the supervisor here:
    if it were the training, its watchdog could not end it."""
    unpack, path = job.unpack_command(f'printf %s "${TEXT}"', "/tmp/run.yml")
    return f"{unpack} && exec maxstack train {path} --supervise --max-restarts 0"


def jobset(job: Job) -> dict[str, Any]:
    """Build the JobSet as a tree."""
    cluster = job.cluster
    metadata = object_metadata(job)
    if job.tpu and job.hosts > 1:  # a slice is a node pool: no two jobs share one
        metadata["annotations"] = {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "ttlSecondsAfterFinished": cluster.ttl_seconds_after_finished,
            "failurePolicy": {
                "maxRestarts": cluster.max_restarts,
                # All pods are gone before new ones begin.
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    {
                        "name": "mistakes",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            # Pods find process 0 by its name, before any of them is ready.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [
                {
                    "name": WORKERS,
                    "replicas": job.topology.slices,
                    "template": {
                        "spec": {
                            "parallelism": job.hosts,
                            "completions": job.hosts,
                            "completionMode": "Indexed",
                            # A pod is never restarted alone: the JobSet counts restarts of all.
                            "backoffLimit": 0,
                            "podFailurePolicy": {
                                "rules": [
                                    {
                                        "action": "FailJob",
                                        "onExitCodes": {
                                            "containerName": CONTAINER,
                                            "operator": "In",
                                            "values": MISTAKES,
                                        },
                                    }
                                ]
                            },
                            "template": _pod(job),
                        }
                    },
                }
            ],
        },
    }


def _pod(job: Job) -> dict[str, Any]:
    """Build the template of a pod that trains."""
    job.check_output()
    container = {
        "name": CONTAINER,
        "command": ["sh", "-c", command(job)],
        "env": _environment(job),
    }
    # A pod failure policy needs it.
    return pod_template(job, container, labels(job), {"restartPolicy": "Never"})


def pod_template(
    job: Placement, container: dict[str, Any], labels: dict[str, str], more: dict[str, Any]
) -> dict[str, Any]:
    """Build the template of a pod from the cluster's description. The `restricted` Pod Security
    Standard accepts it, unless pod.user is null. `more` are further keys of its spec."""
    cluster, pod = job.cluster, job.cluster.pod
    volumes, mounts = _volumes(job)
    container = container | {
        "image": job.needs("image"),
        "resources": _resources(job),
        "volumeMounts": mounts,
    }
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": cluster.grace,
        "automountServiceAccountToken": pod.service_account_token,
        "nodeSelector": _nodes(job),
        "containers": [container],
        "volumes": volumes,
        **more,
    }
    if pod.user:
        spec["securityContext"] = {
            "runAsNonRoot": True,
            "runAsUser": pod.user,
            "runAsGroup": pod.user,
            "fsGroup": pod.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        container["securityContext"] = {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
    if cluster.service_account:
        spec["serviceAccountName"] = cluster.service_account
    if not job.tpu:
        # GKE taints its GPU nodes.
        spec["tolerations"] = [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        ]
    annotations = {"annotations": _sidecar(pod.sidecar)} if cluster.bucket else {}
    return {"metadata": {"labels": labels, **annotations}, "spec": spec}


def object_metadata(job: Placement) -> dict[str, Any]:
    """Return name, namespace and labels, with those of Kueue."""
    queue = {
        "kueue.x-k8s.io/queue-name": job.cluster.queue,
        "kueue.x-k8s.io/priority-class": job.cluster.priority,
    }
    return {
        "name": job.name,
        "namespace": job.cluster.namespace,
        "labels": labels(job) | {key: value for key, value in queue.items() if value},
    }


def labels(job: Placement) -> dict[str, str]:
    """Return the labels of an object and its pods: those that Kubernetes recommends, and
    pod.labels."""
    return {
        "app.kubernetes.io/name": "maxstack",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/managed-by": "maxstack-submit",
        **job.cluster.pod.labels,
    }


def _resources(job: Placement) -> dict[str, dict[str, Any]]:
    """Return requests and limits of the container, which are equal."""
    pod, chips = job.cluster.pod, job.chips_of_a_host
    amounts: dict[str, Any] = {"google.com/tpu" if job.tpu else "nvidia.com/gpu": chips}
    for key, amount, unit in (("cpu", pod.cpu, ""), ("memory", pod.memory, "Gi")):
        if amount is None:
            if job.chip.name not in machines():
                raise ConfigError(
                    f"pod.{key}: no machine with {job.chip.name} is known here; give pod.cpu and "
                    "pod.memory"
                )
            amount = f"{int(machines()[job.chip.name][key]) * chips * 3 // 4}{unit}"
        amounts[key] = amount
    return {"limits": amounts, "requests": dict(amounts)}


def _volumes(job: Placement) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volumes of a pod and their mounts in its container."""
    cluster, pod = job.cluster, job.cluster.pod
    # Without it a container has 64 MiB of /dev/shm.
    memory = {"medium": "Memory", "sizeLimit": pod.shared_memory}
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": memory}]
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if bucket := cluster.bucket:
        source = {
            "driver": "gcsfuse.csi.storage.gke.io",
            "volumeAttributes": {
                "bucketName": bucket.name,
                "mountOptions": mount_options(pod.user),
            },
        }
        volumes.append({"name": "bucket", "csi": source})
        mounts.append({"name": "bucket", "mountPath": bucket.mount})
    for index, volume in enumerate(cluster.volumes):
        kinds = (
            ("persistentVolumeClaim", "claimName", volume.claim),
            ("configMap", "name", volume.config_map),
            ("secret", "secretName", volume.secret),
            ("emptyDir", "sizeLimit", volume.size),
        )
        name = {"name": f"volume-{index}"}
        volumes.append(name | {kind: {key: value} for kind, key, value in kinds if value})
        mounts.append(name | {"mountPath": volume.mount})
        if volume.read_only:
            mounts[-1]["readOnly"] = True
    return volumes, mounts


def mount_options(user: int | None) -> str:
    """Return the options of GCS FUSE for a bucket whose files belong to a user; None is root.

    A checkpoint is finished by renaming its folder, which by default is refused for a folder with
    files (--rename-dir-limit). A user other than root needs ids and modes (gcs-fuse-csi-driver,
    docs/authentication.md; the modes are those that it takes from a pod's fsGroup)."""
    own = f",uid={user},gid={user},file-mode=664,dir-mode=775" if user else ""
    return f"implicit-dirs,rename-dir-limit=200000{own}"


def _sidecar(limits: SidecarConfig) -> dict[str, str]:
    """Return the annotations by which GKE adds GCS FUSE to a pod, with its limits."""
    return {
        "gke-gcsfuse/volumes": "true",
        "gke-gcsfuse/cpu-limit": limits.cpu,
        "gke-gcsfuse/memory-limit": limits.memory,
        "gke-gcsfuse/ephemeral-storage-limit": limits.disk,
    }


def _nodes(job: Placement) -> dict[str, str]:
    """Return the labels that a pod's node must have."""
    name = accelerator(job)
    if job.tpu:
        labels = {
            "cloud.google.com/gke-tpu-accelerator": name,
            "cloud.google.com/gke-tpu-topology": "x".join(map(str, job.topology.sides)),
        }
    else:
        labels = {"cloud.google.com/gke-accelerator": name}
    if job.cluster.reservation:
        labels["cloud.google.com/reservation-name"] = job.cluster.reservation
    return labels


def accelerator(job: Placement) -> str:
    """Return GKE's name of the chip; ConfigError for one that is unknown or of another chip."""
    name = job.cluster.accelerator
    if name and job.chip.name not in machines():
        return name
    known = machine(job, "accelerator").split()
    if name and name not in known:
        raise ConfigError(
            f"accelerator: got {quoted(name)}; allowed: GKE's names of {job.chip.name}: "
            f"{', '.join(known)}; use {known[0]}, or leave it out"
        )
    return name or known[0]


def _environment(job: Job) -> list[dict[str, Any]]:
    """Return the variables that cluster/environment.py reads, except JOB_COMPLETION_INDEX, which
    Kubernetes sets, and those of the cluster's file."""
    plain = {
        "JOBSET_NAME": job.name,
        # The first pod of the first job, by the name that JobSet gives it.
        "JAX_COORDINATOR_ADDRESS": f"{job.name}-{WORKERS}-0-0.{job.name}",
        "PROCESSES_IN_JOB": str(job.hosts),
        "JAX_PROCESS_COUNT": str(job.topology.hosts),
        WAIT: str(PATIENCE),
        "HOME": HOME,
        **job.cluster.env,
    }
    if not job.cluster.config:
        plain[TEXT] = job.packed
    for name, value in plain.items():
        check_size(job, "gke", name, f"{name}={value}\0", STRING)
    given = [{"name": "JOB_INDEX", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}]
    if VARIABLE not in job.cluster.secrets:
        own = {"secretKeyRef": {"name": f"{job.name}-job", "key": "key"}}
        given.append({"name": VARIABLE, "valueFrom": own})
    return [*variables(job, plain), *given]


def variables(job: Placement, plain: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the variables of a container: `plain`, and the cluster's secrets."""
    values = [{"name": name, "value": escape(value)} for name, value in plain.items()]
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}}
        for name, secret in job.cluster.secrets.items()
    ]
    return [*values, *secrets]


def escape(text: str) -> str:
    """Escape a text so that Kubernetes replaces nothing in it: it reads $$ as $."""
    return text.replace("$", "$$")
