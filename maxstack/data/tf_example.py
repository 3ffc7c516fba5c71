"""Records of tf.train.Example, read by protobuf from the message's published fields
(tensorflow/core/example/feature.proto)."""

import functools
from typing import Any

from maxstack.errors import DataError

LISTS = {"bytes_list": "TYPE_BYTES", "float_list": "TYPE_FLOAT", "int64_list": "TYPE_INT64"}


def read_features(data: bytes) -> dict[str, Any]:
    """Return name -> its one value, bytes or a number, or the list of its values. DataError if the
    data is no such message."""
    from google.protobuf.message import DecodeError

    try:
        entries = _message().FromString(data).features.feature
    except DecodeError as error:
        raise DataError(f"not a tf.train.Example: {error}") from error
    values = {}
    for name, feature in entries.items():
        kind = feature.WhichOneof("kind")
        held = [*getattr(feature, kind).value] if kind else []
        values[name] = held[0] if len(held) == 1 else held
    return values


@functools.cache
def _message() -> Any:
    """Return the class of tf.train.Example, under a name of our own."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(
        name="maxstack/example.proto", package="maxstack", syntax="proto3"
    )

    def message(name: str, parent: Any = file.message_type) -> Any:
        made = parent.add()
        made.name = name
        return made

    def field(of: Any, name: str, number: int, kind: str, **more: Any) -> None:
        types = descriptor_pb2.FieldDescriptorProto
        kinds = {"type_name": f".maxstack.{kind}"} if "TYPE" not in kind else {}
        code = types.TYPE_MESSAGE if kinds else getattr(types, kind)
        label = types.LABEL_REPEATED if more.pop("many", False) else types.LABEL_OPTIONAL
        of.field.add(name=name, number=number, type=code, label=label, **kinds, **more)

    feature = message("Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, kind) in enumerate(LISTS.items(), 1):
        field(message(name), "value", 1, kind, many=True)
        field(feature, name, number, name, oneof_index=0)
    features = message("Features")
    entry = message("FeatureEntry", features.nested_type)
    entry.options.map_entry = True
    field(entry, "key", 1, "TYPE_STRING")
    field(entry, "value", 2, "Feature")
    field(features, "feature", 1, "Features.FeatureEntry", many=True)
    field(message("Example"), "features", 1, "Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("maxstack.Example"))
