"""A state as bytes: small, versioned, checksummed, safe to read from anywhere.

Little-endian::

    8 bytes   magic "PYRLSTAT"
    4 bytes   CRC-32 of everything after it
    4 bytes   length of the header
    header    JSON: version, kind, names, layout, clip
    payload   the state's buffer, int64 words
"""

from __future__ import annotations

import json
import struct
import zlib

import numpy as np

from pyrlstats.state import State

MAGIC = b"PYRLSTAT"
_PREFIX = struct.Struct("<8sII")


def to_bytes(state: State, kind: str) -> bytes:
    """Bytes of a state in NumPy memory, of statistics of this kind."""
    header = json.dumps(state.parts(kind)).encode()
    payload: bytes = state.buffer.astype("<i8").tobytes()
    body = struct.pack("<I", len(header)) + header + payload
    return MAGIC + struct.pack("<I", zlib.crc32(body)) + body


def from_bytes(data: bytes | bytearray | memoryview, kind: str) -> State:
    """The state that :func:`to_bytes` wrote of statistics of this kind, in NumPy memory of its own.

    Allocates a few times the data's own size at most.

    Raises:
        ValueError: data that is truncated, corrupted, foreign, of another version or kind, or contradicts itself.
    """
    data = memoryview(data).cast("B")
    if len(data) < _PREFIX.size or data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"not the bytes of a pyrlstats state: they must start with {MAGIC!r}")
    _, checksum, header_length = _PREFIX.unpack_from(data)
    if zlib.crc32(data[len(MAGIC) + 4 :]) != checksum:
        raise ValueError("the checksum does not match: the data is truncated or damaged")
    header, payload = data[_PREFIX.size :][:header_length], data[_PREFIX.size :][header_length:]
    try:
        parts = json.loads(bytes(header))
        if not isinstance(parts, dict):
            raise ValueError("its header must be a JSON object")
        if len(payload) % 8:
            raise ValueError("its payload is no sequence of 8-byte words")
        state = State.from_parts(parts, kind, np.frombuffer(payload, "<i8").astype(np.int64))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise ValueError(f"not the bytes of a pyrlstats state: {error}") from error
    state.check_consistent()
    return state
