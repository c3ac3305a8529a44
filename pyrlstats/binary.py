"""A state as bytes: small, versioned, checksummed, safe to read from anywhere.

Little-endian::

    8 bytes   magic "PYRLSTAT"
    4 bytes   CRC-32 of everything after it
    4 bytes   length of the header
    header    JSON: version, names, layout, clip
    payload   the state's buffer, int64 words
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import astuple

import numpy as np

from pyrlstats.layout import STATE_VERSION
from pyrlstats.state import State

MAGIC = b"PYRLSTAT"
_PREFIX = struct.Struct("<8sII")
_FIELDS = {"version", "names", "layout", "clip"}


def to_bytes(state: State) -> bytes:
    """Bytes of a state in NumPy memory."""
    make = {
        "version": STATE_VERSION,
        "names": state.names,
        "layout": astuple(state.layout),
        "clip": state.clip,
    }
    header = json.dumps(make).encode()
    payload: bytes = state.buffer.astype("<i8").tobytes()
    body = struct.pack("<I", len(header)) + header + payload
    return MAGIC + struct.pack("<I", zlib.crc32(body)) + body


def from_bytes(data: bytes | bytearray | memoryview) -> State:
    """The state that :func:`to_bytes` wrote, in NumPy memory of its own.

    Allocates a few times the data's own size at most.

    Raises:
        ValueError: data that is truncated, corrupted, foreign, of another version or contradicts itself.
    """
    data = memoryview(data).cast("B")
    if len(data) < _PREFIX.size or data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"not the bytes of a pyrlstats state: they must start with {MAGIC!r}")
    _, checksum, header_length = _PREFIX.unpack_from(data)
    if zlib.crc32(data[len(MAGIC) + 4 :]) != checksum:
        raise ValueError("the checksum does not match: the data is truncated or damaged")
    header, payload = data[_PREFIX.size :][:header_length], data[_PREFIX.size :][header_length:]
    try:
        make = json.loads(bytes(header))
        if not isinstance(make, dict) or set(make) != _FIELDS:
            raise ValueError(f"its header must hold exactly {sorted(_FIELDS)}")
        if len(payload) % 8:
            raise ValueError("its payload is no sequence of 8-byte words")
        state = State.from_parts(**make, buffer=np.frombuffer(payload, "<i8").astype(np.int64))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise ValueError(f"not the bytes of a pyrlstats state: {error}") from error
    state.check_consistent()
    return state
