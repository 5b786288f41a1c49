"""Seeded mutations of files and of their decoded contents."""

import copy
import math

from google.protobuf.message import Message

WRONG = (
    None, True, -1, 0, 3, 2**40, 10**30, 0.5, -1.0, math.nan, math.inf, 1e300, "", "x", "0",
    "\x1b[2J", "\udc80", "a" * 1000, [], [1], ["a"], {}, {"a": 1}, b"x",
)  # fmt: skip


def mutate_bytes(content, rng):
    """Flip bits, truncate, zero, overwrite, duplicate or move a range."""
    content, start = bytearray(content), rng.randrange(len(content))
    part = slice(start, start + rng.choice([1, 2, 4, 16, 64, 1000]))
    kind = rng.choice(["flip", "flips", "truncate", "zero", "overwrite", "duplicate", "move"])
    if kind in ("flip", "flips"):
        for _ in range(1 if kind == "flip" else 20):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind == "truncate":
        del content[start:]
    elif kind == "zero":
        content[part] = bytes(len(content[part]))
    elif kind == "overwrite":
        content[part] = rng.randbytes(len(content[part]))
    else:
        copied = content[part]
        if kind == "move":
            del content[part]
        content[(to := rng.randrange(len(content) + 1)) : to] = copied
    return bytes(content)


def mutate_values(values, rng):
    """Replace, swap or remove values at any depth of nested dictionaries and lists."""
    values = copy.deepcopy(values)
    for _ in range(rng.choice([1, 1, 1, 3])):
        places = list(_places(values))
        (container, key), (other, name) = rng.choice(places), rng.choice(places)
        kind = rng.choice(["replace", "replace", "swap", "remove"])
        if kind == "replace":
            container[key] = copy.deepcopy(rng.choice(WRONG))
        elif kind == "swap":
            container[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(container[key])
        else:
            del container[key]
    return values


def _places(values):
    """Yield (container, key) of each value at any depth."""
    for key, value in list(values.items() if isinstance(values, dict) else enumerate(values)):
        yield values, key
        if isinstance(value, dict | list):
            yield from _places(value)


def mutate_message(message, rng):
    """Change, duplicate, swap or remove fields at any depth of a protobuf message."""
    result = copy.deepcopy(message)
    for _ in range(rng.choice([1, 1, 1, 3])):
        owner = rng.choice(list(_messages(result)))
        field, value = rng.choice(owner.ListFields() or [(None, None)])
        if field is None:
            continue
        repeated = not isinstance(value, Message | str | bytes | int | float)
        if rng.random() < 0.2:
            owner.ClearField(field.name)
        elif repeated and isinstance(value[0], Message):
            first, second = rng.randrange(len(value)), rng.randrange(len(value))
            copied = copy.deepcopy(value[first])
            if rng.random() < 0.5:
                value.add().CopyFrom(copied)
            else:
                value[first].CopyFrom(value[second])
                value[second].CopyFrom(copied)
        elif repeated:
            value[rng.randrange(len(value))] = _other(value[0], rng)
        elif not isinstance(value, Message):
            try:
                setattr(owner, field.name, _other(value, rng))
            except ValueError:  # an enumeration
                setattr(owner, field.name, 1)
    return result


def _messages(message):
    yield message
    for _, value in message.ListFields():
        if isinstance(value, Message):
            yield from _messages(value)
        elif not isinstance(value, str | bytes | int | float) and isinstance(value[0], Message):
            for item in value:
                yield from _messages(item)


def _other(value, rng):
    if isinstance(value, str):
        return rng.choice(["", "x", "Loop", "Identity", "lenet_ops", "logits", "nan", "1e30", "[]"])
    if isinstance(value, bytes):
        return mutate_bytes(value, rng) if value else b"x"
    if isinstance(value, float):
        return rng.choice([0.0, -1.0, 1e30, math.nan])
    return rng.choice([0, 1, 2, 3, 7, 28, 2**20, 2**31 - 1])
