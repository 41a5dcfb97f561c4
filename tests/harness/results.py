"""Results of cases as JSON: numbers, strings, lists, dicts and numpy arrays."""

import base64
import json
from typing import Any

import numpy as np


def encode(value: Any) -> str:
    """One line of JSON; arrays keep dtype, shape and every bit."""
    return json.dumps(value, default=_encode_special)


def decode(line: str) -> Any:
    return json.loads(line, object_hook=_decode_special)


def _encode_special(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, np.generic):
        return value.item() if not isinstance(value, np.bytes_) else bytes(value).decode(errors="replace")
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or value.dtype.kind in "SU":
            return value.tolist()
        return {"__array__": base64.b64encode(np.ascontiguousarray(value).tobytes()).decode(), "dtype": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError("a case returned %r of type %s, which has no JSON form" % (value, type(value).__name__))


def _decode_special(value: dict) -> Any:
    if "__array__" not in value:
        return value
    raw = base64.b64decode(value["__array__"])
    return np.frombuffer(raw, dtype=value["dtype"]).reshape(value["shape"])
