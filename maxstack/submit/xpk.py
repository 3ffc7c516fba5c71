"""The command line of xpk, which is no dependency: `xpk workload create` and `create-pathways`."""

import shlex

from maxstack.cluster.exit_codes import CRASHED, RETRY
from maxstack.config import ConfigError
from maxstack.submit.gke import mount_options
from maxstack.submit.job import Job, machine, within
from maxstack.submit.limits import STRING, WRAPPER, check_strings

UNSAFE = set("\"'\\`$")
"""What xpk would hand on into YAML and a shell without quoting it, beside what cannot be
printed."""
HEAD = "/tmp"


def command(job: Job) -> list[str]:
    """The words of the command; `create-pathways` where the run's runtime is that. ConfigError for
    a value that xpk does not quote."""
    cluster, tpu, pathways = job.cluster, job.tpu, job.cfg.runtime == "pathways"
    for name, value in cluster.env.items():
        if odd := sorted(
            UNSAFE & {*value} | {letter for letter in value if not letter.isprintable()}
        ):
            raise ConfigError(
                f"env.{name}: xpk does not quote {' '.join(map(repr, odd))}; put the "
                "value into a secret, or use --target gke"
            )
        if pathways and "env:" in value:
            raise ConfigError(
                f"env.{name}: xpk takes `env:` for its own with Pathways; give another value"
            )
    if not tpu and (job.topology.slices > 1 or job.chips_of_a_host != job.chip.chips_per_host):
        raise ConfigError(
            f"topology: xpk has whole hosts of {job.chip.chips_per_host} GPUs; give "
            f"{job.chip.name}:HOSTSx{job.chip.chips_per_host}"
        )
    if pathways and not tpu:
        raise ConfigError(f"topology: Pathways runs on TPUs, not on {job.chip.name}")
    if pathways and cluster.bucket:
        raise ConfigError("bucket: xpk mounts none with Pathways; leave it out (--set bucket=null)")
    if pathways and not within(job.cfg.run.output_dir, HEAD):
        raise ConfigError(
            f"run.output_dir={job.cfg.run.output_dir}: with Pathways xpk mounts {HEAD} "
            "of the head's host and nothing else; give "
            f"{HEAD}/runs, and copy what is to be kept"
        )
    kind = (
        [
            f"--tpu-type={machine(job, 'xpk')}-{'x'.join(map(str, job.topology.sides))}",
            f"--num-slices={job.topology.slices}",
        ]
        if tpu
        else [f"--device-type={machine(job, 'xpk')}", f"--num-nodes={job.topology.hosts}"]
    )
    given = {
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
        *(f"--{key}={value}" for key, value in given.items() if value),
        *kind,
        f"--docker-image={job.needs('image')}",
        f"--max-restarts={cluster.max_restarts}",
        f"--termination-grace-period-seconds={cluster.grace}",
        f"--ttl-seconds-after-finished={cluster.ttl_seconds_after_finished}",
        *(
            _elastic(job)
            if pathways
            else [f"--restart-on-exit-codes={RETRY},{CRASHED}", f"--storage={_storage(job)}"]
        ),
        *(f"--env={name}={value}" for name, value in cluster.env.items()),
        f"--command={_inside(job)}",
    ]
    check_strings(job, "xpk", ((word.partition("=")[0], word) for word in words), STRING - WRAPPER)
    return words


def _inside(job: Job) -> str:
    """What each container runs: the configuration unpacked, and training in its place. xpk restarts
    no head of Pathways, so a supervisor does."""
    again = (
        f" --supervise --max-restarts {job.cluster.max_restarts}"
        if job.cfg.runtime == "pathways"
        else ""
    )
    unpack, path = job.unpacking(f"echo {job.packed}", "/tmp/run.yml")
    return f"{unpack} && exec maxstack train {path}{again}"


def _elastic(job: Job) -> list[str]:
    """How many slices the proxy is to do without."""
    if (elastic := job.cfg.faults.elastic) is None:
        return []
    return [
        f"--elastic-slices={job.topology.slices - elastic.least}",
        f"--max-slice-restarts={job.cluster.max_restarts}",
    ]


def _storage(job: Job) -> str:
    """The bucket, as xpk knows it."""
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
            f"bucket.storage: xpk mounts what it was told of once, by `{attach}`; do "
            "that, and give the NAME"
        )
    return bucket.storage


def shown(words: list[str]) -> str:
    """As one types it."""
    return shlex.join(words)
