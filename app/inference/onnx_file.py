"""Check ONNX files: their digest, and limits that ONNX Runtime does not enforce."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import onnx
from google.protobuf.message import Message
from onnx import ModelProto, NodeProto, StringStringEntryProto, TensorProto

from app.config.errors import UserError

T = TypeVar("T", bound=Message)
DOMAIN = "lenet_ops"  # of the exported functions; importing `ops.export` would take a second
STANDARD = ("", "ai.onnx")
MAX_BYTES = 2**28  # the largest `SeparableConfig` has 252 MB of weights
MAX_NODES = 10_000  # with the nodes of functions, for each call
DIGEST = "digest"  # metadata: BLAKE2b of the file with `ZEROS` in its place
ZEROS = 32 * "0"


def to_bytes(model: ModelProto) -> bytes:
    """Serialise a model with its digest, which `read_model` verifies."""
    model.metadata_props.add(key=DIGEST, value=ZEROS)
    content = model.SerializeToString(deterministic=True)
    return _with_digest(content, ZEROS, _digest(content))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=len(ZEROS) // 2).hexdigest()


def _with_digest(content: bytes, old: str, new: str) -> bytes:
    """Replace the digest `old` by `new`."""
    entries = [StringStringEntryProto(key=DIGEST, value=value) for value in (old, new)]
    return content.replace(*(entry.SerializeToString() for entry in entries))


def read_model(path: Path) -> bytes:
    """Return the content of an ONNX file; raise a ValueError if it exceeds a limit.

    Raise a UserError if its digest differs. Functions that call each other could double the number
    of nodes at every level.
    """
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
    content = path.read_bytes()
    model = onnx.load_model_from_string(content)
    for item in model.metadata_props:  # files of older versions and other programs have no digest
        if item.key == DIGEST and item.value != _digest(_with_digest(content, item.value, ZEROS)):
            remedy = f"export it again, or remove its metadata {DIGEST!r} after a change"
            raise UserError(f"checkpoint={path}: its digest differs, so it is damaged: {remedy}")
    functions, graph = model.functions, model.graph
    if foreign := sorted({function.domain for function in functions} - {DOMAIN}):
        raise ValueError(f"it defines functions of the domain {foreign[0]!r}, not of {DOMAIN}")
    bodies = [list(_find(function, NodeProto)) for function in functions]
    if any(node.domain not in STANDARD for body in bodies for node in body):
        raise ValueError("it defines a function with operators that are not standard")
    longest = max(map(len, bodies), default=1)
    count = sum(1 if node.domain in STANDARD else longest for node in _find(graph, NodeProto))
    if count > MAX_NODES:
        raise ValueError(f"it has more than {MAX_NODES:,} nodes")
    if any(tensor.data_location == TensorProto.EXTERNAL for tensor in _find(model, TensorProto)):
        raise ValueError("it has weights in another file")
    return content


def _find(message: Message, kind: type[T]) -> Iterator[T]:
    """Yield the messages of a type at any depth inside of a message."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in [value] if isinstance(value, Message) else value:
                if isinstance(part, kind):
                    yield part
                yield from _find(part, kind)
