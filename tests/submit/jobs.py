"""Jobs for the tests of submit, and their JobSets as Kubernetes reads them."""

import json
from pathlib import Path

import jsonschema
import yaml

from maxstack.plan.topology import parse
from maxstack.schema.cluster import ClusterConfig
from maxstack.submit import gke
from maxstack.submit.job import Job

SCHEMA = jsonschema.Draft202012Validator(
    json.loads(Path(__file__).with_name("jobset-v1alpha2.json").read_text())
)
FACTS = {
    "image": "repo/maxstack:1",
    "cluster": "c",
    "bucket": {"name": "bucket", "storage": "stored"},
}


def cluster(topology="v5e:4x4", **facts):
    """A cluster's description."""
    return ClusterConfig.model_validate(FACTS | {"topology": topology} | facts)


def job(cfg, topology="v5e:4x4", **facts):
    """A job for it, unchecked."""
    return Job("a-run", cluster(topology, **facts), parse(topology), cfg)


def jobset(one):
    """The JobSet, valid by its schema."""
    tree = yaml.safe_load(gke.manifest(one))
    SCHEMA.validate(tree)
    return tree


def template(tree):
    """The pods' template in a JobSet."""
    return tree["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
