"""One step as a line of JSON with a checksum, its state sparse and equal to the bit when read back.

::

    {"crc":"9ae0daaf","step":12,"time":1764304070.25,"scalars":{"loss":0.31},"state":"eNpj..."}

``crc`` is the CRC-32, in hexadecimal, of the bytes of the line after its comma, without the line feed. ``time`` is in
seconds since 1970. Scalars are numbers, or the strings "nan", "inf", "-inf". ``tails``, where they were observed, holds
``sample_size`` and the figures of ``TailShape.to_dict``, like scalars. ``state`` is absent where no statistics were
observed; else base64 of zlib of

- n, uint32: how many words of the state's buffer are not 0,
- n uint32: the distance of each from the one before it (of the first from 0),
- n int64 words: their values, the first bytes of all, then the second bytes of all, and so on.

All little-endian. The state's make (version, kind, names, layout, clip) is in the folder's run.json.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int64]

_PREFIX = len('{"crc":"00000000",')


def encode_line(fields: Mapping[str, Any]) -> bytes:
    """A line with its checksum, line feed included; ``fields`` hold strict JSON values and are not empty."""
    rest = json.dumps(fields, separators=(",", ":"), allow_nan=False)[1:].encode()
    return b'{"crc":"%08x",' % zlib.crc32(rest) + rest + b"\n"


def decode_line(line: bytes) -> dict[str, Any]:
    """The fields of a line, with or without its line feed.

    Raises:
        ValueError: a torn or damaged line.
    """
    line = line.rstrip(b"\n")
    try:
        checksum = int(line[8:16], 16)
    except ValueError:
        raise ValueError("no checksum at the start of the line") from None
    if zlib.crc32(line[_PREFIX:]) != checksum:
        raise ValueError("the checksum does not match: the line is torn or damaged")
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("the line is no JSON object")
    return fields


def encode_words(words: Words) -> str:
    """A state's buffer, sparse."""
    index = np.flatnonzero(words)
    distance = np.diff(index, prepend=0).astype("<u4")
    values = words[index].astype("<i8").view(np.uint8).reshape(-1, 8).T  # equal high bytes lie side by side
    data = np.uint32(len(index)).astype("<u4").tobytes() + distance.tobytes() + values.tobytes()
    return base64.b64encode(zlib.compress(data, 6)).decode()


def decode_words(text: str, size: int) -> Words:
    """The buffer of ``size`` words that :func:`encode_words` took.

    Raises:
        ValueError: something else.
    """
    limit = 4 + 12 * size
    inflate = zlib.decompressobj()
    try:
        data = inflate.decompress(base64.b64decode(text, validate=True), limit + 1)
    except zlib.error as error:
        raise ValueError(f"not a sparse state: {error}") from error
    n = int(np.frombuffer(data, "<u4", 1)[0]) if len(data) >= 4 else 0
    if not inflate.eof or len(data) != 4 + 12 * n or len(data) > limit:
        raise ValueError(f"not a sparse state of at most {size} words: {len(data)} bytes")
    index = np.frombuffer(data, "<u4", n, 4).astype(np.int64).cumsum()
    if n and index[-1] >= size:
        raise ValueError(f"a word at {index[-1]} lies outside a state of {size} words")
    values = np.frombuffer(data, np.uint8, 8 * n, 4 + 4 * n).reshape(8, n).T
    words = np.zeros(size, np.int64)
    words[index] = np.ascontiguousarray(values).view("<i8")[:, 0]
    return words


def encode_scalars(scalars: Mapping[str, float]) -> dict[str, float | str]:
    """Numbers as strict JSON values."""
    return {key: value if np.isfinite(value) else str(float(value)) for key, value in scalars.items()}


def decode_scalars(fields: Mapping[str, float | str]) -> dict[str, float]:
    """What :func:`encode_scalars` took."""
    return {key: float(value) if isinstance(value, str) else value for key, value in fields.items()}
