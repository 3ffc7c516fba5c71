"""The command line of xpk, which is not a dependency: `xpk workload create` and
`create-pathways`."""

import shlex

from maxstack.cluster.exit_codes import CRASHED, RETRY
from maxstack.errors import ConfigError
from maxstack.schema.cluster import STRING
from maxstack.submit.gke import monitor_commands, mount_options
from maxstack.submit.job import (
    WRAPPER,
    Job,
    Submission,
    check_size,
    is_within,
    machine,
)

UNSAFE = set("\"'\\`$")
"""Characters that xpk passes to YAML and a shell unquoted; it does so with unprintable ones too."""
HEAD = "/tmp"
"""The only folder that xpk mounts with Pathways."""


def submission(job: Job) -> Submission:
    """Return the commands of xpk, and of kubectl for the JobSet that xpk makes."""
    words = command(job)
    options = ("--cluster=", "--project=", "--zone=", "--namespace=")
    cluster = [word for word in words if word.startswith(options)]
    later = {
        "status": ["xpk", "workload", "list", *cluster, f"--filter-by-job=^{job.name}$"],
        "stop": ["xpk", "workload", "delete", f"--workload={job.name}", *cluster, "--force"],
    }
    logs = monitor_commands(job, ["--all-containers"], 4 * job.topology.hosts + 4)
    return Submission(words, f"{shlex.join(words)}\n", logs | later)


def command(job: Job) -> list[str]:
    """Return the words of the command. ConfigError for a value that xpk does not quote."""
    cluster, tpu = job.cluster, job.tpu
    pathways = job.cfg.runtime == "pathways"
    for name, value in cluster.env.items():
        if odd := sorted({char for char in value if char in UNSAFE or not char.isprintable()}):
            raise ConfigError(
                f"env.{name}: xpk does not quote {' '.join(map(repr, odd))}; put the value into a "
                "secret, or use --target gke"
            )
        if pathways and "env:" in value:
            raise ConfigError(f"env.{name}: with Pathways xpk reserves `env:`; give another value")
    if not tpu and (job.topology.slices > 1 or job.chips_of_a_host != job.chip.chips_per_host):
        raise ConfigError(
            f"topology: xpk takes whole hosts of {job.chip.chips_per_host} GPUs; give "
            f"{job.chip.name}:HOSTSx{job.chip.chips_per_host}"
        )
    if pathways and not tpu:
        raise ConfigError(f"topology: Pathways runs on TPUs, not on {job.chip.name}")
    if pathways and cluster.bucket:
        raise ConfigError("bucket: xpk mounts none with Pathways; leave it out (--set bucket=null)")
    if pathways and not is_within(job.cfg.run.output_dir, [HEAD]):
        raise ConfigError(
            f"run.output_dir={job.cfg.run.output_dir}: with Pathways xpk mounts only {HEAD} of the "
            f"head's host; give {HEAD}/runs, and copy what you want to keep"
        )
    device = machine(job, "xpk")
    if tpu:
        sides = "x".join(map(str, job.topology.sides))
        hardware = [f"--tpu-type={device}-{sides}", f"--num-slices={job.topology.slices}"]
    else:
        hardware = [f"--device-type={device}", f"--num-nodes={job.topology.hosts}"]
    if pathways:
        restarts = _elastic(job)
    else:
        restarts = [f"--restart-on-exit-codes={RETRY},{CRASHED}", f"--storage={_storage(job)}"]
    location = {
        "project": cluster.project,
        "zone": cluster.zone,
        "namespace": cluster.namespace,
        "priority": cluster.priority,
    }
    words = [
        "xpk",
        "workload",
        "create-pathways" if pathways else "create",
        f"--workload={job.name}",
        f"--cluster={job.needs('cluster')}",
        *(f"--{key}={value}" for key, value in location.items() if value),
        *hardware,
        f"--docker-image={job.needs('image')}",
        f"--max-restarts={cluster.max_restarts}",
        f"--termination-grace-period-seconds={cluster.grace}",
        f"--ttl-seconds-after-finished={cluster.ttl_seconds_after_finished}",
        *restarts,
        *(f"--env={name}={value}" for name, value in cluster.env.items()),
        f"--command={_inside(job)}",
    ]
    for word in words:
        check_size(job, "xpk", word.partition("=")[0], f"{word}\0", STRING - WRAPPER)
    return words


def _inside(job: Job) -> str:
    """Return the command of each container: unpack the configuration and train. xpk does not
    restart the head of Pathways, so a supervisor does."""
    unpack, path = job.unpack_command(f"echo {job.packed}", "/tmp/run.yml")
    train = f"{unpack} && exec maxstack train {path}"
    if job.cfg.runtime != "pathways":
        return train
    return f"{train} --supervise --max-restarts {job.cluster.max_restarts}"


def _elastic(job: Job) -> list[str]:
    """Return the options for the number of slices that the proxy may lose."""
    if (elastic := job.cfg.faults.elastic) is None:
        return []
    return [
        f"--elastic-slices={job.topology.slices - elastic.least}",
        f"--max-slice-restarts={job.cluster.max_restarts}",
    ]


def _storage(job: Job) -> str:
    """Return the name of the bucket in xpk; ConfigError, with the command that attaches it, where
    it has none."""
    bucket = job.needs("bucket")
    job.check_output()
    if not bucket.storage:
        attach = (
            f"xpk storage attach NAME --cluster={job.needs('cluster')} --type=gcsfuse "
            f"--bucket={bucket.name} --mount-point={bucket.mount} "
            f"--mount-options={mount_options(job.cluster.pod.user)} --readonly=false "
            "--auto-mount=false --size=1000"
        )
        raise ConfigError(
            f"bucket.storage: xpk mounts only attached storage; run `{attach}` once, and give the "
            "NAME"
        )
    return bucket.storage
