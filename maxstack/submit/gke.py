"""A JobSet for GKE: a job a slice, a pod a host, restarted as a whole on any exit but 0 and a mistake's."""

from typing import Any

import yaml

from maxstack.cluster.joining import WAIT
from maxstack.submit.job import Job, machine
from maxstack.submit.limits import check_object, check_strings

TEXT = "MAXSTACK_CONFIG"
WORKERS, CONTAINER = "w", "train"
MISTAKES = [1, 2]
MOUNT_OPTIONS = "implicit-dirs,rename-dir-limit=200000"
"""Of GCS FUSE: a checkpoint is finished by renaming its folder, which is refused by default where that is not empty (its --rename-dir-limit)."""
PATIENCE = 3600
"""Seconds that a pod waits for the others: nodes of other slices may still be on their way."""
INDEX = "metadata.annotations['jobset.sigs.k8s.io/job-index']"


def manifest(job: Job) -> str:
    """The YAML of the JobSet, which holds the run's configuration, packed."""
    made = jobset(job)
    check_object(job, made)
    return yaml.safe_dump(made, sort_keys=False, width=10**6)


def command(job: Job) -> str:
    """What a container runs.

    Linux shields a container's first process, the supervisor here, from SIGKILL by others: the
    training must not be that, or its watchdog could not end it."""
    unpack, path = job.unpacking(f'printf %s "${TEXT}"', "/tmp/run.yml")
    return f"{unpack} && exec maxstack train {path} --supervise --max-restarts 0"


def jobset(job: Job) -> dict[str, Any]:
    """As Kubernetes reads it."""
    cluster = job.cluster
    queue = {"kueue.x-k8s.io/queue-name": cluster.queue, "kueue.x-k8s.io/priority-class": cluster.priority}
    metadata: dict[str, Any] = {"name": job.name, "namespace": cluster.namespace}
    if labels := {key: value for key, value in queue.items() if value}:
        metadata["labels"] = labels
    if job.tpu and job.hosts > 1:  # a slice is a node pool: no two jobs share one
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata,
        "spec": {
            "failurePolicy": {"maxRestarts": cluster.max_restarts, "restartStrategy": "BlockingRecreate", "rules": [
                {"name": "mistakes", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": WORKERS, "replicas": job.topology.slices, "template": {"spec": {
                "parallelism": job.hosts, "completions": job.hosts, "completionMode": "Indexed", "backoffLimit": 0,
                "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": {
                    "containerName": CONTAINER, "operator": "In", "values": MISTAKES}}]},
                "template": _pod(job)}}}]}}


def _pod(job: Job) -> dict[str, Any]:
    cluster, mounted = job.cluster, job.bucket()
    volumes = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}, {"name": "bucket", "csi": {
        "driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": {"bucketName": mounted.name, "mountOptions": MOUNT_OPTIONS}}}]
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}, {"name": "bucket", "mountPath": mounted.mount}]
    resource = {"google.com/tpu" if job.tpu else "nvidia.com/gpu": job.chips_of_a_host}
    container = {"name": CONTAINER, "image": job.needs("image"), "command": ["sh", "-c", command(job)], "env": _environment(job),
                 "resources": {"limits": resource, "requests": dict(resource)}, "volumeMounts": mounts}
    spec: dict[str, Any] = {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": cluster.grace, "nodeSelector": _nodes(job), "containers": [container],
        "volumes": volumes}
    if cluster.service_account:
        spec["serviceAccountName"] = cluster.service_account
    if not job.tpu:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    limits = {f"gke-gcsfuse/{what}-limit": "0" for what in ("cpu", "memory", "ephemeral-storage")}  # none: it may take what the node has
    return {"metadata": {"annotations": {"gke-gcsfuse/volumes": "true", **limits}}, "spec": spec}


def _nodes(job: Job) -> dict[str, str]:
    name = job.cluster.accelerator or machine(job, "accelerator")
    chosen = {"cloud.google.com/gke-accelerator": name}
    if job.tpu:
        chosen = {"cloud.google.com/gke-tpu-accelerator": name, "cloud.google.com/gke-tpu-topology": "x".join(map(str, job.topology.sides))}
    return chosen | ({"cloud.google.com/reservation-name": job.cluster.reservation} if job.cluster.reservation else {})


def _environment(job: Job) -> list[dict[str, Any]]:
    """What cluster/environment.py reads, JOB_COMPLETION_INDEX being Kubernetes' own, and the cluster's; Kubernetes takes $$ for $."""
    plain = {"JOBSET_NAME": job.name, "JAX_COORDINATOR_ADDRESS": f"{job.name}-{WORKERS}-0-0.{job.name}", "PROCESSES_IN_JOB": str(job.hosts),
             "JAX_PROCESS_COUNT": str(job.topology.hosts), WAIT: str(PATIENCE), **job.cluster.env}
    if not job.cluster.config:
        plain[TEXT] = job.packed
    check_strings(job, "gke", ((name, f"{name}={value}") for name, value in plain.items()))
    found: list[dict[str, Any]] = [{"name": name, "value": value.replace("$", "$$")} for name, value in plain.items()]
    found.append({"name": "JOB_INDEX", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}})
    for name, secret in job.cluster.secrets.items():
        found.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}})
    return found
