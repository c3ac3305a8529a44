"""Bytes of a state: equal when read back, ValueError for anything else, never more memory than the data's size."""

from __future__ import annotations

import copy
import json
import pickle
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrlstats import Layout, SliceAccumulator, SliceStats
from pyrlstats.binary import MAGIC
from pyrlstats.layout import COUNTS
from pyrlstats.state import State
from pyrlstats.values import ValueStats, value_stats

CORPUS = Path(__file__).parent / "corpus"
SMALL = Layout(mantissa_bits=0, min_exp=-4, max_exp=4)


def example(layout: Layout = SMALL) -> SliceStats:
    x = np.array([0.0, -0.0, 0.3, -0.01, 5000.0, -300.0, 1e-40, np.nan, np.inf, -np.inf], np.float32)
    masks = {"all": np.ones(10, bool), "größe": np.arange(10) < 4, "none": np.zeros(10, bool)}
    accumulator = SliceAccumulator(list(masks), layout=layout, clip=(0.2, 0.28))
    return accumulator.update(x, np.zeros(10, np.float32), masks).compute()


def signed(body: bytes) -> bytes:
    return MAGIC + struct.pack("<I", zlib.crc32(body)) + body


def packed(header: Any, payload: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return signed(struct.pack("<I", len(text) if length is None else length) + text + payload)


VALID = (CORPUS / "state_v1.bin").read_bytes()  # example(), as the first release wrote it
HEADER_LENGTH = struct.unpack_from("<I", VALID, 12)[0]
HEADER = json.loads(VALID[16 : 16 + HEADER_LENGTH])
PAYLOAD = VALID[16 + HEADER_LENGTH :]


def test_kinds_are_not_mixed_up() -> None:
    """Rewards are no log-ratios: their bytes would answer with a KL."""
    rewards = value_stats(np.array([1.0, 2.0], np.float32))
    assert ValueStats.from_bytes(rewards.to_bytes())["all"].mean == 1.5
    for read in (SliceStats.from_bytes, lambda data: SliceStats.from_state_dict(rewards.state_dict())):
        with pytest.raises(ValueError, match="kind 'log_ratio' are wanted, got 'value'"):
            read(rewards.to_bytes())
    with pytest.raises(ValueError, match="kind 'value' are wanted, got 'log_ratio'"):
        ValueStats.from_bytes(VALID)
    accumulator = SliceAccumulator(["all"], layout=rewards.state.layout)
    for other in (rewards, [rewards]):
        with pytest.raises(TypeError, match="merge takes SliceAccumulator, SliceStats or an iterable, got ValueStats"):
            accumulator.merge(other)  # type: ignore[arg-type]


@pytest.mark.parametrize("broken", [{}, {"buffer": None}, {"more": 1}], ids=str)
def test_state_dicts_that_are_none(broken: dict[str, Any]) -> None:
    whole = example().state_dict()
    with pytest.raises(ValueError, match=r"the parts of a state are|int64 words"):
        SliceStats.from_state_dict({**whole, **broken} if broken else {})


@pytest.mark.parametrize("layout", [SMALL, Layout(), Layout(mantissa_bits=7, min_exp=-24, max_exp=40)], ids=str)
def test_round_trip(layout: Layout) -> None:
    stats = example(layout)
    data = stats.to_bytes()
    back = SliceStats.from_bytes(data)
    assert back.to_bytes() == data
    assert (back.state.names, back.state.layout, back.state.clip) == (stats.state.names, layout, (0.2, 0.28))
    np.testing.assert_array_equal(back.state.buffer, stats.state.buffer)
    np.testing.assert_equal(back.to_dict(), stats.to_dict())
    assert back.state.sum("far_k3")[0] == np.inf
    # its own memory, and any kind of buffer
    back.state.buffer[...] = 0
    for kind in (bytearray(data), memoryview(data)):
        assert SliceStats.from_bytes(kind).to_bytes() == data
    assert SliceStats.from_bytes(data).merge(stats)["all"].n_tokens == 20


def test_a_tensor_and_an_array_have_the_same_bytes() -> None:
    stats = example()
    assert stats.to("cpu").to_bytes() == stats.to_bytes()


def test_other_ways_out() -> None:
    """Pickle, copies and state_dict."""
    tensors = SliceStats.from_bytes(VALID).to("cpu")
    pickled = pickle.loads(pickle.dumps(tensors))
    assert isinstance(pickled.state.buffer, np.ndarray)  # readable where there is no GPU and no torch
    assert pickled.to_bytes() == VALID
    for copied in (copy.copy(tensors), copy.deepcopy(tensors)):
        assert isinstance(copied.state.buffer, torch.Tensor)
        assert copied.to_bytes() == VALID
    assert SliceStats.from_state_dict(tensors.state_dict()).to_bytes() == VALID
    mixed = [tensors, pickled, SliceStats.from_bytes(VALID)]
    assert mixed[0].merge(mixed[1:]).to_bytes() == mixed[1].merge(mixed[::2]).to_bytes()
    for key, value in {
        "version": 2,
        "names": ["all"],
        "layout": [5, -24],
        "clip": [0.2],
        "buffer": torch.zeros(3, dtype=torch.int64),
    }.items():
        with pytest.raises(ValueError):
            SliceStats.from_state_dict({**tensors.state_dict(), key: value})


def test_an_accumulator_survives_pickle() -> None:
    x = torch.tensor([0.1, -0.3])
    accumulator = SliceAccumulator(["all"]).update(x, x * 0)
    back = pickle.loads(pickle.dumps(accumulator))
    assert back.update(x, x * 0).compute()["all"].n_tokens == 4
    assert accumulator.compute()["all"].n_tokens == 2
    assert pickle.loads(pickle.dumps(SliceAccumulator(["all"]))).compute()["all"].n_tokens == 0


def test_corpus() -> None:
    """What a released version wrote stays readable; what it did not write is refused."""
    stats = SliceStats.from_bytes(VALID)
    assert stats.to_bytes() == VALID
    numbers = json.loads((CORPUS / "state_v1.json").read_text())
    assert stats.to_dict() == pytest.approx(numbers, rel=1e-12, nan_ok=True)
    fresh = example().state
    assert (fresh.names, fresh.layout, fresh.clip) == (stats.state.names, stats.state.layout, stats.state.clip)
    for part in ("counts", "histogram", "maxima"):
        np.testing.assert_array_equal(getattr(fresh, part), getattr(stats.state, part))
    refused = sorted(CORPUS.glob("refused_*.bin"))
    assert len(refused) >= 8
    for path in refused:
        with pytest.raises(ValueError, match=r"not the bytes|checksum|contradict"):
            SliceStats.from_bytes(path.read_bytes())


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(["as it is", "magic", "signed", "header"]))
def test_arbitrary_bytes(data: bytes, dressed: str) -> None:
    forms = {"as it is": data, "magic": MAGIC + data, "signed": signed(data), "header": packed(data, PAYLOAD)}
    with pytest.raises(ValueError):
        SliceStats.from_bytes(forms[dressed])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_mutations(data: st.DataObject) -> None:
    """Without the checksum all are refused; with it made right again what is read back is what was written."""
    mutated = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "repeat"]))
        if kind == "flip":
            mutated[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del mutated[at : at + data.draw(st.integers(1, 100))]
        elif kind == "insert":
            mutated[at:at] = data.draw(st.binary(min_size=1, max_size=16))
        else:
            mutated[at:at] = mutated[at : at + 64]
        mutated = mutated or bytearray(b"x")
    if bytes(mutated) != VALID:
        with pytest.raises(ValueError):
            SliceStats.from_bytes(bytes(mutated))
    resigned = signed(bytes(mutated[12:]))
    try:
        stats = SliceStats.from_bytes(resigned)
    except ValueError:
        return
    np.testing.assert_array_equal(SliceStats.from_bytes(stats.to_bytes()).state.buffer, stats.state.buffer)
    stats.to_dict()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(HEADER)), JSON)
def test_any_json_in_a_field(field: str, value: Any) -> None:
    try:
        stats = SliceStats.from_bytes(packed({**HEADER, field: value}, PAYLOAD))
    except ValueError:
        return
    stats.to_dict()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        MAGIC,
        VALID[:-1],
        VALID[:-8],
        VALID + b"\0" * 8,
        packed(HEADER, PAYLOAD[:-8]),
        packed(HEADER, PAYLOAD + b"\0" * 3),
        packed(HEADER, PAYLOAD, length=0xFFFFFFFF),
        packed(HEADER, PAYLOAD, length=0),
        packed(b"[" * 200_000, PAYLOAD),
        packed(b'{"a":' * 100_000, PAYLOAD),
        packed(b"9" * 100_000, PAYLOAD),
        packed(b"\xff\xfe" + b"\0" * 50, PAYLOAD),
        packed({**HEADER, "version": 2}, PAYLOAD),
        packed({**HEADER, "version": "1"}, PAYLOAD),
        packed({**HEADER, "layout": [10, -120, 8]}, PAYLOAD),
        packed({**HEADER, "layout": [10**30, 0, 1]}, PAYLOAD),
        packed({**HEADER, "layout": [0, -(10**9), 10**9]}, PAYLOAD),
        packed({**HEADER, "layout": {"mantissa_bits": 0}}, PAYLOAD),
        packed({**HEADER, "names": "abc"}, PAYLOAD),
        packed({**HEADER, "names": ["a", "a", "b"]}, PAYLOAD),
        packed({**HEADER, "names": ["a", "b", 3]}, PAYLOAD),
        packed({**HEADER, "names": [["a"], "b", "c"]}, PAYLOAD),
        packed({**HEADER, "clip": {}}, PAYLOAD),
        packed({**HEADER, "clip": [1e400, 0.1]}, PAYLOAD),
        packed({**HEADER, "clip": [0.1, 10**400]}, PAYLOAD),
        packed({**HEADER, "more": 1}, PAYLOAD),
        packed([HEADER], PAYLOAD),
        packed({**HEADER, "names": [str(i) for i in range(10_000)], "layout": [10, -120, 8]}, PAYLOAD),
    ],
    ids=range(29),
)
def test_refused_in_little_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):
            SliceStats.from_bytes(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 30 * len(data) + 200_000


def test_memory_of_a_valid_read() -> None:
    data = SliceStats(State.empty(["all"], Layout(10, -24, 40), (0.2, 0.2))).to_bytes()
    tracemalloc.start()
    SliceStats.from_bytes(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * len(data)


def damage(part: str, index: Any, value: Any) -> bytes:
    state = SliceStats.from_bytes(VALID).state
    getattr(state, part)[index] = value
    return packed(HEADER, state.buffer.tobytes())


@pytest.mark.parametrize(
    ("part", "index", "value"),
    [
        ("counts", (0, COUNTS.index("n_tokens")), 11),
        ("counts", (0, COUNTS.index("n_nan")), -1),
        ("counts", (0, COUNTS.index("clip_low")), 100),
        ("counts", (1, COUNTS.index("n_far")), 9),
        ("counts", (0, COUNTS.index("n_out_of_range")), 2**60),
        ("histogram", (0, 0), -5),
        ("histogram", (0, slice(None)), 2**62),
        ("histogram", (0, slice(None)), 2**53),
        ("sums", (0, 0), np.nan),
        ("maxima", (0, 0), np.nan),
        ("maxima", (0, 0), np.inf),
        ("maxima", (0, 0), -6000.0),
        ("maxima", (0, 1), 1e39),
        ("maxima", (2, 0), 1.0),
        ("maxima", (1, 0), -np.inf),
    ],
)
def test_contents_that_no_tokens_make(part: str, index: Any, value: Any) -> None:
    with pytest.raises(ValueError, match="contradict"):
        SliceStats.from_bytes(damage(part, index, value))


def test_what_is_no_buffer_is_a_type_error() -> None:
    for value in (10**12, "text", None):
        with pytest.raises(TypeError):
            SliceStats.from_bytes(value)  # type: ignore[arg-type]
