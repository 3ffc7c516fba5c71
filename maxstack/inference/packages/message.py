"""Messages of the Open Inference Protocol: what a request asks, and the answer as it is sent."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxstack import strict_json
from maxstack.errors import DataError, quoted
from maxstack.inference.packages import tensors
from maxstack.inference.server.refusal import Refusal

HEADER = "Inference-Header-Content-Length"
"""Bytes of JSON at the beginning of a body; the rest is the binary data of its tensors."""
MOST_JSON = 8 << 20
"""Bytes of JSON at most."""
FIELDS = {"id", "model_name", "parameters", "inputs", "outputs"}
"""The protocol's, and the name that KServe's client sends beside the path."""
INPUT = {"name", "datatype", "shape", "data", "parameters"}
OUTPUT = {"name", "parameters"}


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request."""

    id: str | None
    inputs: dict[str, np.ndarray]
    outputs: dict[str, bool] | None
    """Names of the results that are asked for, and whether as binary data; None: all."""
    binary: bool
    """Whether results are binary data where `outputs` does not say it."""


def read(body: bytes, header: str | None, model: str, spec: Mapping[str, Any]) -> Ask:
    """Parse the body of a request to a model; `spec` is its signature in the manifest. Refusal for
    what is wrong or unknown: nothing is ignored."""
    message, rest = _parts(body, header)
    _known("the request", message, FIELDS)
    number = message.get("id")
    if number is not None and not isinstance(number, str):
        raise Refusal(400, f"id: must be a text, not {quoted(number)}")
    # KServe's client repeats the name of the path in the body.
    if message.get("model_name") not in (None, model):
        raise Refusal(400, f"model_name: {quoted(message['model_name'])} is asked as {model}")
    own = _parameters("the request", message, {"binary_data_output"})
    binary = _flag("binary_data_output", own.get("binary_data_output", False))
    inputs: dict[str, np.ndarray] = {}
    for each in _objects("inputs", message.get("inputs")):
        name = _name("inputs", each, spec["inputs"], inputs)
        inputs[name], rest = _input(name, each, spec["inputs"][name], rest)
    if missing := [name for name in spec["inputs"] if name not in inputs]:
        raise Refusal(400, f"inputs: {', '.join(missing)} is missing")
    # Sizes that do not add up mean that the tensors were cut at wrong places.
    if len(rest):
        raise Refusal(400, f"{len(rest)} bytes follow the binary data of the inputs")
    outputs: dict[str, bool] = {}
    for each in _objects("outputs", message.get("outputs") or []):
        name = _name("outputs", each, spec["outputs"], outputs)
        _known(name, each, OUTPUT)
        given = _parameters(name, each, {"binary_data"})
        outputs[name] = _flag(f"{name}.binary_data", given.get("binary_data", binary))
    return Ask(number, inputs, outputs or None, binary)


def write(
    ask: Ask, model: str, version: str, results: Mapping[str, np.ndarray], told: Mapping[str, int]
) -> tuple[bytes, dict[str, str]]:
    """Return the body of an answer and its headers; `told` are its parameters."""
    # Results in the order in which they were asked for; their binary data follows in the same.
    wanted = ask.outputs or dict.fromkeys(results, ask.binary)
    outputs: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for name, binary in wanted.items():
        array = results[name]
        output: dict[str, Any] = {
            "name": name,
            "datatype": tensors.NAMES[array.dtype.name],
            "shape": list(array.shape),
        }
        if binary:
            blobs.append(tensors.to_bytes(array))
            output["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            output["data"] = tensors.to_values(name, array)
        outputs.append(output)
    message: dict[str, Any] = {"model_name": model, "model_version": version}
    if ask.id is not None:
        message["id"] = ask.id
    message |= {"parameters": dict(told), "outputs": outputs}
    text = json.dumps(message, separators=(",", ":")).encode()
    if not blobs:
        return text, {"Content-Type": "application/json"}
    headers = {"Content-Type": "application/octet-stream", HEADER: str(len(text))}
    return b"".join([text, *blobs]), headers


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; Refusal for anything else."""
    try:
        return strict_json.parse_object(body, "the body")
    except DataError as error:
        raise Refusal(400, str(error)) from None


def json_size(body: bytes, header: str | None) -> int:
    """Return the bytes of JSON at the beginning of a body. Refusal for too many."""
    length = len(body)
    if header is not None:
        # Bounded digits: `int` refuses very long ones by an error of its own.
        number = header if header.isascii() and header.isdecimal() and len(header) < 20 else "-1"
        if not 0 <= int(number) <= len(body):
            raise Refusal(400, f"{HEADER}: {quoted(header)} is no length within the body")
        length = int(number)
    if length > MOST_JSON:
        raise Refusal(
            413, f"the JSON of the request is larger than {MOST_JSON} bytes; send binary data"
        )
    return length


def _parts(body: bytes, header: str | None) -> tuple[dict[str, Any], memoryview]:
    length = json_size(body, header)
    # A view, so that tensors of up to 64 MiB are not copied for each slice.
    return read_object(body[:length]), memoryview(body)[length:]


def _input(
    name: str, given: Mapping[str, Any], spec: Mapping[str, Any], rest: memoryview
) -> tuple[np.ndarray, memoryview]:
    """Return a tensor of the request, and the binary data after it."""
    _known(name, given, INPUT)
    wanted = tensors.NAMES[spec["dtype"]]
    if (datatype := given.get("datatype")) != wanted:
        raise Refusal(400, f"{name}: datatype is {quoted(datatype)}; it must be {wanted}")
    shape = tensors.shape_of(name, given.get("shape"))
    size = _parameters(name, given, {"binary_data_size"}).get("binary_data_size")
    if size is None:
        return tensors.from_values(name, wanted, shape, given.get("data")), rest
    if "data" in given:
        raise Refusal(400, f"{name}: has data and binary_data_size; give one of them")
    # True is an int in Python.
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(rest):
        raise Refusal(
            400,
            f"{name}: binary_data_size is {quoted(size)}; {len(rest)} bytes of it are left",
        )
    return tensors.from_bytes(name, wanted, shape, rest[:size]), rest[size:]


def _objects(field: str, given: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise Refusal(400, f"{field}: must be a list of objects")
    return given


def _name(field: str, given: Mapping[str, Any], there: Mapping[str, Any], seen: Any) -> str:
    """Return the name of a tensor. Refusal where it is unknown, or given twice."""
    name = given.get("name")
    if not isinstance(name, str) or name not in there:
        raise Refusal(400, f"{field}: {quoted(name)} is none of {', '.join(there)}")
    if name in seen:
        raise Refusal(400, f"{field}: {name} is there twice")
    return name


def _parameters(where: str, given: Mapping[str, Any], known: set[str]) -> Mapping[str, Any]:
    parameters = given.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise Refusal(400, f"{where}: parameters must be an object")
    _known(f"parameters of {where}", parameters, known)
    return parameters


def _known(where: str, given: Mapping[str, Any], known: set[str]) -> None:
    if unknown := given.keys() - known:
        raise Refusal(400, f"{where}: this server does not know {quoted(sorted(unknown)[0])}")


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise Refusal(400, f"{name}: must be true or false, not {quoted(value)}")
    return value
