"""Names in a cluster's file: what Kubernetes, registries and buckets take, and what they refuse."""

import re
from collections.abc import Iterator

import pytest

from maxstack import config
from maxstack.config.annotations import bare, item, members, section, shape
from maxstack.errors import ConfigError
from maxstack.schema import names
from maxstack.schema.cluster import ClusterConfig, SlurmConfig

DIGEST = f"@sha256:{'0a' * 32}"
TAKEN = {
    "namespace": ["a", "9-a", "a" * 63],
    "service_account": ["my-sa", "a.b-c.9", "a" * 253],
    "secrets.A.name": ["hugging-face"],
    "secrets.A.key": ["HF_TOKEN", "_a", ".dockerconfigjson", "a..b"],
    "queue": ["my-queue.x", "a" * 63],
    "priority": ["very-high", "team.urgent"],
    "image": [
        "i",
        "maxstack:V1_a.b-c",
        "localhost/a__b/c--d",
        "us-docker.pkg.dev/p/i/maxstack:latest",
        "registry:5000/a.b/c_d:1" + DIGEST,
        "Registry.Example.com/a" + DIGEST,
        f"a:{'T' * 128}",
    ],
    "bucket.name": ["b12", "my_bucket", "logs.example.com", f"{'a' * 63}.{'b' * 63}"],
    "bucket.storage": ["my-storage"],
    "pod.labels": ["{a: A_1}", "{example.com/Team_1: a.b}", f"{{{'a' * 63}: b}}"],
    "cluster": ["my-cluster"],
    "zone": ["us-west4-a", "us-central1-ai1a"],
    "project": ["my-project", "example.com:my-project"],
    "env": ["{_A1: x}"],
}
REFUSED = {
    "namespace": ["My", "a.b", "-a", "a-", "a" * 64, "a_b"],
    "service_account": ["My_SA", "a..b", ".a", "a-.b", "a" * 254],
    "secrets.A.name": ["Hugging_Face"],
    "secrets.A.key": ["a/b", "..a", ".", "..", "a b"],
    "queue": ["my_queue.x", "Q", "a" * 64],
    "priority": ["Urgent", "a_b"],
    "image": [
        "us-docker.pkg.dev/My-Project/i:latest",
        "Maxstack",
        "Repo/maxstack:1",
        "a//b",
        "a/_b",
        "a___b",
        '"a:"',
        "a:-x",
        f"a:{'t' * 129}",
        "a@sha256:12",
        "/a",
        "https://a.b/c",
        "a" * 256,
    ],
    "bucket.name": [
        "ab",
        "My",
        "a..b",
        "goog-a",
        "my-google",
        "10.0.0.1",
        "a" * 64,
        "gs://abc",
        "ab-",
    ],
    "bucket.storage": ["my_storage"],
    "pod.labels": [
        f"{{a: {'b' * 64}}}",
        "{a..b/c: d}",
        "{A.com/c: d}",
        f"{{{'a' * 64}: b}}",
        f"{{{'a' * 254}/b: c}}",
        "{a/b/c: d}",
        "{a: b-}",
    ],
    "cluster": ["My_Cluster", "9a", "a" * 64],
    "zone": ["us_west"],
    "project": ["My-Project", "a/b"],
    "env": ["{A-B: x}", "{1A: x}", "{A.B: x}"],
}
FREE = {"topology", "context", "config", "pod.cpu", "pod.memory", "pod.shared_memory"}
"""Texts that are no names, each with a check of its own."""


def loaded(key: str, text: str) -> ClusterConfig:
    """A cluster's file with what else the key needs."""
    around = {
        "secrets": ["secrets.A.name=a", "secrets.A.key=a"],
        "bucket": ["bucket.name=abc"],
    }.get(key.partition(".")[0], [])
    return config.load(ClusterConfig, {"topology": "v5e:4x4"}, [*around, f"{key}={text}"])


@pytest.mark.parametrize("key", TAKEN)
def test_a_name_that_is_right_is_taken(key):
    for text in TAKEN[key]:
        loaded(key, text)


@pytest.mark.parametrize("key", REFUSED)
def test_a_name_that_nothing_there_can_have_is_refused_with_the_rule_and_one_that_is_right(key):
    for text in REFUSED[key]:
        with pytest.raises(ConfigError) as error:
            loaded(key, text)
        found = re.fullmatch(
            rf"[^ ]+ {re.escape(key)}(\.\S+)?: got '.*'( \(text\))?; allowed: .* "
            r"characters, such as (?P<example>\S+)",
            str(error.value),
        )
        assert found, str(error.value)
        if not text.startswith("{"):
            loaded(key, found["example"])


def texts(model, start="") -> Iterator[tuple[str, object]]:
    """(path, annotation) of every field that holds text."""
    for name, field in model.model_fields.items():
        annotation = config.annotations.of_field(field)
        for each in members(annotation):
            inner = each
            while shape(inner) in (dict, list) and section(inner) is None:
                inner = item(inner)
            if (below := section(inner)) is not None:
                if below is not SlurmConfig:
                    yield from texts(below, f"{start}{name}.")
            elif bare(inner) is str:
                yield f"{start}{name}", (annotation, each, inner)


def test_every_text_in_a_cluster_s_file_has_its_rule():
    without = {
        path
        for path, found in texts(ClusterConfig)
        if "Rule(" not in repr(found) and "pattern" not in repr(found)
    }
    assert without <= FREE
    assert {"image", "bucket.name", "queue"} <= {path for path, _ in texts(ClusterConfig)}
    assert names.Rule("a", 1, "an a", "a").check("a") == "a"
