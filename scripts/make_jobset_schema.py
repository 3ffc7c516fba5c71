"""Writes tests/submit/jobset-v1alpha2.json, the schema of a JobSet with its jobs and pods, strict:
unknown keys are refused.

`pip install kubeflow-trainer-api==2.3.0` into an environment of its own, and run this there. That
package holds the types of JobSet's own OpenAPI description of v1alpha2; jobset_crd.yml has
further rules for our fields from its CRD.

example: python scripts/make_jobset_schema.py
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from bench import arguments

OUT = Path(__file__).resolve().parent.parent / "tests/submit/jobset-v1alpha2.json"
CRD = Path(__file__).with_name("jobset_crd.yml")


def main() -> int:
    """Write the file; returns the exit code."""
    arguments.parser(__doc__).parse_args()
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    schema = _plain(JobsetV1alpha2JobSet.model_json_schema(by_alias=True))
    further = yaml.safe_load(CRD.read_text(encoding="utf-8"))
    for name, fields in further["fields"].items():
        for field, more in fields.items():
            schema["$defs"][name]["properties"][field] = more
    schema["$defs"] |= further["types"]
    for resources in ("limits", "requests"):
        schema["$defs"]["IoK8sApiCoreV1ResourceRequirements"]["properties"][resources] = {
            "type": "object",
            "additionalProperties": further["types"]["IoK8sApimachineryPkgApiResourceQuantity"],
        }
    document = {
        "$comment": f"kubeflow-trainer-api {version('kubeflow-trainer-api')} by "
        "scripts/make_jobset_schema.py",
        **_strict(schema),
    }
    OUT.write_text(json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n")
    print(f"{OUT}: {OUT.stat().st_size:,} bytes")
    return 0


def _plain(schema: Any) -> Any:
    """A schema without descriptions, defaults, and null for optional fields."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        key: value
        for key, value in schema.items()
        if key not in ("description", "title", "default") or isinstance(value, dict)
    }
    types = [each for each in kept.get("anyOf", []) if each != {"type": "null"}]
    if types and len(types) < len(kept["anyOf"]):
        return _plain(types[0] if len(types) == 1 else {"anyOf": types})
    return {key: _plain(value) for key, value in kept.items()}


def _strict(schema: Any) -> Any:
    """A schema that refuses unknown keys."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    if "properties" in strict and strict.get("type") == "object":
        strict["additionalProperties"] = False
    return strict


if __name__ == "__main__":
    sys.exit(main())
