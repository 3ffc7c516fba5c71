"""`maxstack submit MODEL --serve`: objects that Kubernetes takes, and what they run."""

import json
import re
import socket
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml
from pod_security import violations
from processes import stand_ins

from maxstack import cli
from maxstack.inference.server import process
from maxstack.inference.tools import FORMATS
from maxstack.schema.serve import ServeConfig
from maxstack.submit import vllm

STRICT = {"type": "object", "additionalProperties": False}
INTEGER, STRING = {"type": "integer", "minimum": 0}, {"type": "string"}
TEXTS = {"type": "object", "additionalProperties": STRING}
POD = {"$ref": "#/$defs/IoK8sApiCoreV1PodTemplateSpec"}
METADATA = {"$ref": "#/$defs/IoK8sApimachineryPkgApisMetaV1ObjectMeta"}
SPECS = {
    # Kubernetes' OpenAPI description: io.k8s.api.apps.v1.DeploymentSpec, core.v1.ServiceSpec
    ("apps/v1", "Deployment"): {
        "required": ["selector", "template"],
        "properties": {
            "replicas": INTEGER,
            "progressDeadlineSeconds": INTEGER,
            "selector": {"$ref": "#/$defs/IoK8sApimachineryPkgApisMetaV1LabelSelector"},
            "template": POD,
        },
    },
    ("v1", "Service"): {
        "required": ["ports", "selector"],
        "properties": {
            "type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]},
            "selector": TEXTS,
            "ports": {
                "items": {
                    "required": ["port"],
                    "properties": {"name": STRING, "port": INTEGER, "targetPort": STRING},
                    **STRICT,
                }
            },
        },
    },
    # kubernetes-sigs/lws, api/leaderworkerset/v1/leaderworkerset_types.go
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): {
        "required": ["leaderWorkerTemplate"],
        "properties": {
            "replicas": INTEGER,
            "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
            "leaderWorkerTemplate": {
                "required": ["workerTemplate"],
                "properties": {
                    "size": INTEGER,
                    "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "None"]},
                    "leaderTemplate": POD,
                    "workerTemplate": POD,
                },
                **STRICT,
            },
        },
    },
}
DEFS = json.loads(Path(__file__).with_name("jobset-v1alpha2.json").read_text())["$defs"]
FACTS = {
    "topology": "v5e:2x2",
    "image": "repo/maxstack:1",
    "bucket": {"name": "bucket"},
    "env": {"A": "b$(C)"},
}
MODEL = "/gcs/runs/llama"


def check(tree):
    """Validate an object against its kind's schema, and its pods by the restricted standard."""
    spec = SPECS[tree["apiVersion"], tree["kind"]] | STRICT
    keys = {"apiVersion": STRING, "kind": STRING, "metadata": METADATA, "spec": spec}
    schema = {"$defs": DEFS, "required": [*keys], "properties": keys, **STRICT}
    jsonschema.Draft202012Validator(schema).validate(tree)
    for template in templates(tree):
        assert violations(template["spec"]) == set()


def templates(tree):
    """The pod templates of an object; a LeaderWorkerSet's leader first."""
    group = tree["spec"].get("leaderWorkerTemplate", tree["spec"])
    names = "template", "leaderTemplate", "workerTemplate"
    return [group[name] for name in names if name in group]


@pytest.fixture
def shown(tmp_path, capsys):
    """Calls the command; the checked objects, or what a refusal says."""

    def submit(*words, model=MODEL, code=0, **facts):
        (tmp_path / "cluster.yml").write_text(yaml.safe_dump(FACTS | facts))
        where = ["--target", "gke", "--cluster", str(tmp_path / "cluster.yml"), "--dry-run"]
        assert cli.main(["submit", model, "--serve", *where, *words]) == code
        printed = capsys.readouterr()
        if code:
            return printed.err
        trees = list(yaml.safe_load_all(printed.out))
        for tree in trees:
            check(tree)
        return *trees, printed.err

    return submit


def container(tree, index=0):
    return templates(tree)[index]["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("topology", "limit", "node"),
    [
        ("v5e:2x2", {"google.com/tpu": 4}, "cloud.google.com/gke-tpu-topology"),
        ("h100:1x8", {"nvidia.com/gpu": 8}, "cloud.google.com/gke-accelerator"),
    ],
)
def test_a_deployment_serves_on_the_devices_of_a_host(topology, limit, node, shown):
    deployment, service, _ = shown("serve.rows=32", "--replicas", "2", topology=topology)
    pod, own = templates(deployment)[0], container(deployment)
    assert deployment["kind"] == "Deployment" and deployment["spec"]["replicas"] == 2
    assert (
        limit.items() <= own["resources"]["limits"].items() and node in pod["spec"]["nodeSelector"]
    )
    assert {"name": "A", "value": "b$$(C)"} in own["env"]
    assert own["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    annotations = pod["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(own["ports"][0]["containerPort"])
    assert annotations["prometheus.io/scrape"] == annotations["gke-gcsfuse/volumes"] == "true"
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert selector == service["spec"]["selector"] == pod["metadata"]["labels"]
    assert service["spec"]["ports"][0]["targetPort"] == own["ports"][0]["name"]


def run(command, folder, **variables):
    """What a container's command starts, with stand-ins for the programs of its image."""
    note = 'printf "%s " "$(basename "$0")" "$@" >> "$NOTED"; echo >> "$NOTED"'
    programs = dict.fromkeys(("maxstack", "vllm", "ray"), note)
    programs["python3"] = f'[ "$1" = -c ] && {note}'
    own = stand_ins(folder / "bin", programs) | {"NOTED": str(folder / "noted")} | variables
    subprocess.run([word.replace("$$", "$") for word in command], env=own, check=True)
    return (folder / "noted").read_text()


def test_a_pod_gets_overrides_unchanged(shown, tmp_path):
    nasty = "run.name=a b'\"$(id) $HOME"
    deployment, _, _ = shown("serve.rows=32", nasty)
    assert run(container(deployment)["command"], tmp_path) == (
        f"maxstack serve {MODEL} --host 0.0.0.0 --port 8000 --served-model-name llama --grace 550 "
        f"serve.rows=32 {nasty} run.compilation_cache=/gcs/.cache/maxstack/xla \n"
    )


def test_a_pod_has_time_to_drain(shown, tmp_path):
    deployment, _, _ = shown("--engine", "vllm", grace=100)
    own, spec = container(deployment), templates(deployment)[0]["spec"]
    asleep = int(own["lifecycle"]["preStop"]["exec"]["command"][1])
    words = run(own["command"], tmp_path).split()
    drain = int(words[words.index("--shutdown-timeout") + 1])
    assert int(words[words.index("--seed") + 1]) >= 0
    assert drain > 0 and asleep + drain + process.GRACE < spec["terminationGracePeriodSeconds"]
    assert "grace=79: requests need 80 s to end" in shown(code=1, grace=79)


def test_several_hosts_need_vllm(shown):
    said = shown(code=1, topology="h100:2x8")
    assert "h100:2x8 has 2 hosts, and maxstack's server runs on the devices of one process" in said
    assert "--engine vllm, which gets a LeaderWorkerSet" in said
    assert "has 2 slices" in shown("--engine", "vllm", code=1, topology="v5e:2x2*2")


@pytest.mark.parametrize(
    ("topology", "sizes"),
    [
        ("h100:2x8", "--pipeline-parallel-size 2 .*--tensor-parallel-size 8"),
        ("v5e:4x4", "--tensor-parallel-size 16"),
    ],
)
def test_a_leader_of_vllm_waits_for_its_workers_and_answers(topology, sizes, shown, tmp_path):
    secrets = {"VLLM_API_KEY": {"name": "s", "key": "k"}}
    group, service, _ = shown(
        "--engine", "vllm", "serve.max_requests=9", topology=topology, secrets=secrets
    )
    leader, worker = container(group), container(group, 1)
    assert group["spec"]["leaderWorkerTemplate"]["size"] == (2 if topology[0] == "h" else 4)
    assert service["metadata"]["name"] != group["metadata"]["name"]
    labels = [template["metadata"]["labels"] for template in templates(group)]
    assert service["spec"]["selector"] == labels[0] != labels[1]
    assert [each for each in leader["env"] if each["name"] == "VLLM_API_KEY"][0]["valueFrom"]
    run(leader["command"], tmp_path)
    said = run(worker["command"], tmp_path, LWS_LEADER_ADDRESS="leader.x")
    for part in (
        r"ray start --head --port=6379 \npython3 -c import os, ray",
        rf"vllm serve {MODEL} .*{sizes}",
        "--max-num-seqs 9",
        "--distributed-executor-backend ray",
        r"ray start --address=leader\.x:6379 --block \n",
    ):
        assert re.search(part, said), part


def test_a_worker_stays_until_its_leader_has_ended(shown, tmp_path, monkeypatch):
    group, _, _ = shown("--engine", "vllm", topology="h100:2x8")
    words = container(group, 1)["lifecycle"]["preStop"]["exec"]["command"]
    with socket.create_server(("127.0.0.1", 0)) as leader:
        port = str(leader.getsockname()[1])
        words = [word.replace("$$", "$").replace("6379", port) for word in words]
        monkeypatch.setenv("LWS_LEADER_ADDRESS", "127.0.0.1")
        ending = subprocess.Popen(words)
        with pytest.raises(subprocess.TimeoutExpired):
            ending.wait(1.5)
    assert ending.wait(30) == 0


def test_every_key_of_serve_becomes_a_flag_of_vllm_or_a_line(capsys):
    serve = ServeConfig(rows=32, speculate=4, draft="mtp", prefix_cache=False, cache_dtype="int8")
    flags = vllm.serve_flags(serve, 2)
    given = dict(zip(flags[::2], flags[1::2], strict=False))
    drafts = json.loads(given["--speculative-config"])
    assert drafts == {"method": "mtp", "num_speculative_tokens": 4}
    assert given["--kv-cache-dtype"] == "int8_per_token_head"
    assert flags[-1] == "--no-enable-prefix-caching"
    said = capsys.readouterr().err
    assert "serve.rows=32: vLLM chooses" in said and "serve.identical=check: not checked" in said
    handed = "cache cache_dtype max_length max_requests identical prefix_cache speculate draft"
    assert {*handed.split(), "adapters"} | vllm.INSTEAD.keys() == ServeConfig.model_fields.keys()
    assert vllm.TOOL_PARSERS.keys() == FORMATS.keys()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("serve.rowz=3", "serve.rowz"),
        ("--max-restarts 3", "--max-restarts and --force: are for training"),
        ("--engine vllm serve.identical=strict", "vLLM does not promise it"),
        ("--engine vllm quantization=int8", "quantization=int8: vLLM cannot take it"),
        ("--engine vllm mesh.tensor=3", "the mesh is the topology's"),
        ("--engine vllm serve.adapters.a=b", "maxstack lora merge"),
        ("--engine vllm --api-key-file /keys/k", "the variable VLLM_API_KEY"),
    ],
)
def test_settings_that_pods_could_not_run_are_refused(words, says, shown):
    assert says in shown(*words.split(), code=1)


def test_a_model_outside_the_bucket_and_missing_keys_are_reported(shown):
    said = shown(model="/home/me/model")[-1]
    assert "the image must have it on every host: /home/me/model" in said
    assert "serves everybody who reaches it; see --api-key-file" in said
    quiet = shown("--api-key-file", "/keys/k", model="Org/Name")
    assert "not in the bucket" not in quiet[-1] and "everybody" not in quiet[-1]
    assert "--api-key-file /keys/k" in container(quiet[0])["command"][-1]


def test_kubectl_creates_and_deletes_the_objects(tmp_path, monkeypatch, maxstack):
    note = 'echo "$*" >> "$NOTED"; case "$*" in *create*) cat > "$NOTED.given";; esac'
    own = stand_ins(tmp_path / "bin", {"kubectl": note})
    own |= {"NOTED": str(tmp_path / "noted"), "XDG_STATE_HOME": str(tmp_path / "state")}
    for key, value in own.items():
        monkeypatch.setenv(key, value)
    (tmp_path / "cluster.yml").write_text(yaml.safe_dump(FACTS))
    maxstack(f"submit {MODEL} --serve --target gke --cluster {tmp_path}/cluster.yml")
    given = yaml.safe_load_all((tmp_path / "noted.given").read_text())
    assert [tree["kind"] for tree in given] == ["Deployment", "Service"]
    maxstack("stop llama-serve")
    last = (tmp_path / "noted").read_text().splitlines()[-1]
    both = "deployment/llama-serve service/llama-serve"
    assert last == f"--namespace=default delete {both} --cascade=foreground"
