"""Optional statistics against their definition: every engine, fresh random and adversarial tokens, every way in."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pyrlstats
from pyrlstats import reference
from pyrlstats.backends import tokens as token_blocks
from pyrlstats.groups import reference as defined
from pyrlstats.slice_stats import SCALARS

EVERYTHING: dict[str, Any] = {"truncate": (0.5, 2.0), "entropy": True, "probabilities": True, "sequences": True}
QUANTILES = ("update_abs_p50", "update_abs_p99", "update_abs_p99_9")  # within a bin
# of differences of sums, what is left; of the logarithm of a sum that is right to 5e-7, so much
LEAST = {"probability_correlation": 1e-6, "probability_diff_std": 3e-8, "sequence_renyi2_unnormalised": 1e-6}
COUNTS = ("n_advantage_not_finite", "n_sequences", "n_sequences_finite", "n_sequences_empty")


def truth(logp: Any, old: Any, member: Any, sequence: Any, n_sequences: int, A: Any, options: Any) -> dict[str, float]:
    """Every optional statistic of one slice, from its tokens (n,)."""
    x = reference.log_ratio(logp, old)[member]
    return {
        "perplexity_ess_fraction": reference.statistics(x).get("perplexity_ess_fraction", math.nan),
        **defined.probability_statistics(logp[member], old[member]),
        **defined.truncation_statistics(x, options["truncate"]),
        **defined.advantage_statistics(x, A[member], dual_clip=options.get("dual_clip", 3.0)),
        **defined.sequence_statistics(logp, old, member, sequence, n_sequences),
    }


def assert_right(got: dict[str, float], slice_name: str, wanted: dict[str, float]) -> None:
    assert {f"{slice_name}/{name}" for name in wanted} <= got.keys()
    problems = []
    for name, want in wanted.items():
        value = got[f"{slice_name}/{name}"]
        if name in COUNTS:
            right = value == want
        elif name in QUANTILES:
            inside = 2.0**-24 <= want <= 2.0**40
            right = not inside or abs(value - want) <= abs(want) * 2.0**-5
        elif math.isnan(want) or math.isinf(want):
            right = value == want or (math.isnan(value) and math.isnan(want))
        else:
            least = LEAST.get(name, 1e-9)
            right = abs(value - want) <= 1e-6 * abs(want) + least
        if not right:
            problems.append(f"{name}: got {value}, wanted {want}")
    assert not problems, f"{slice_name}: " + "; ".join(problems)


def check(engine: Any, logp: Any, old: Any, masks: Any, A: Any, *, ends: Any = None, **changed: Any) -> Any:
    """All optional statistics of rows [B, T], or of packed tokens with ``ends``, against the definition."""
    options = EVERYTHING | changed
    packed = {} if ends is None else {"cu_seqlens": ends}
    stats = engine.stats(logp, old, masks, advantages=A, **options, **packed)
    got = stats.to_dict()
    shape = logp.shape
    if ends is None:
        sequence = np.repeat(np.arange(shape[0]), shape[1])
        n_sequences = shape[0]
        A = A[:, None] if A.ndim == 1 else A
    else:
        sequence = np.searchsorted(np.asarray(ends), np.arange(logp.size), side="right") - 1
        n_sequences = len(ends) - 1
        sequence[sequence >= n_sequences] = -1
    flat_a = np.broadcast_to(A, shape).reshape(-1)
    for name, mask in masks.items():
        member = np.broadcast_to(mask, shape).reshape(-1) != 0
        wanted = truth(logp.reshape(-1), old.reshape(-1), member, sequence, n_sequences, flat_a, options)
        assert_right(got, name, wanted)
    return stats


def tokens(rng: Any, shape: Any, scale: float = 0.3) -> tuple[Any, Any, Any]:
    base, x = -np.abs(rng.standard_normal(shape)), scale * rng.standard_t(2, shape)
    logp, old = (base + np.minimum(x, 0)).astype(np.float32), (base - np.maximum(x, 0)).astype(np.float32)
    masks = {"all": np.ones(shape, bool), "some": rng.random(shape) < 0.4, "none": np.zeros(shape, bool)}
    masks["some"][: max(shape[0] // 4, 1)] = False
    return logp, old, masks


@pytest.mark.parametrize("scale", [1e-5, 1e-2, 0.5, 20.0])
def test_rows(engine, rng, scale):
    logp, old, masks = tokens(rng, (13, 70), scale)
    check(engine, logp, old, masks, rng.standard_normal((13, 70)).astype(np.float32))
    check(engine, logp, old, masks, rng.standard_normal(13).astype(np.float32), truncate=(0.9, 1.1), dual_clip=1.5)


def test_packed_with_sequences_of_all_lengths(engine, rng):
    lengths = [1, 0, 0, 300, 1, 1, 17, 0, 2, 5, 0]
    ends = np.concatenate(([3], 3 + np.cumsum(lengths)))  # three tokens before the first, some after the last
    n = int(ends[-1]) + 9
    logp, old, masks = tokens(rng, (n,), 0.1)
    A = rng.standard_normal(n)
    stats = check(engine, logp, old, masks, A, ends=ends)
    assert stats["all"].n_sequences == sum(length > 0 for length in lengths)
    assert stats["all"].n_sequences_empty == sum(length == 0 for length in lengths)


def test_across_the_borders_of_blocks(engine, rng, monkeypatch):
    monkeypatch.setattr(token_blocks, "_BLOCK_WORDS", 96)
    logp, old, masks = tokens(rng, (5, 61), 0.1)
    check(engine, logp, old, masks, rng.standard_normal(5))
    logp, old, masks = (logp.reshape(-1), old.reshape(-1), {name: mask.reshape(-1) for name, mask in masks.items()})
    check(engine, logp, old, masks, rng.standard_normal(305), ends=np.array([0, 1, 150, 150, 151, 305]))


def test_one_long_sequence(engine, rng):
    n = 400_000
    logp, old, _ = tokens(rng, (n,), 1e-3)
    masks = {"all": np.ones(n, bool)}
    check(engine, logp, old, masks, rng.standard_normal(n), ends=np.array([0, n - 1, n]))


def test_any_number_of_threads_gives_the_same_bits(rng):
    n = 5 * 16384 + 77  # chunks, the last one short
    logp, old, masks = tokens(rng, (n,), 2.0)
    A = rng.standard_normal(n)
    ends = np.concatenate(([0, 5, 16384, 16390], np.sort(rng.integers(16390, n, 40)), [n]))
    states = [
        pyrlstats.slice_stats(
            logp, old, masks, advantages=A, cu_seqlens=ends, num_threads=threads, **EVERYTHING
        ).state.buffer
        for threads in (1, 2, 16)
    ]
    assert np.array_equal(states[0], states[1])
    assert np.array_equal(states[0], states[2])


def test_more_slices_than_bits_of_a_word(engine, rng):
    logp, old, _ = tokens(rng, (6, 50))
    masks = {f"slice {index}": rng.random((6, 50)) < 0.1 for index in range(70)}
    check(engine, logp, old, masks, rng.standard_normal(6))


def test_strided_and_broadcast(engine, rng):
    wide, A = rng.standard_normal((40, 12)).astype(np.float32), rng.standard_normal((40, 6))
    logp, old = -np.abs(wide[:, ::2]).T[::-1], -np.abs(wide[:, 1::2]).T[::-1]
    masks = {"row": np.arange(6)[:, None] > 2, "column": np.arange(40) % 3 == 0, "all": np.ones((1, 1), np.int16)}
    check(engine, logp, old, masks, A.T)


@pytest.mark.parametrize(
    "x",
    [
        [0.0] * 8,
        [700.0, 699.0, -3.0, 0.1],
        [-300.0] * 5,
        [-800.0, -801.0],
        [5000.0, 1.0],
        [0.5, -0.5, np.nextafter(np.float32(0.5), np.float32(0))],
        [np.nan, np.inf, -np.inf, 0.25],
        [np.nan, np.inf],
        [1e-30, -1e-30, 1e-45],
        [2.0] * 3 + [-2.0] * 3,
    ],
    ids=str,
)
def test_extremes(engine, x):
    x = np.array([x], np.float32)
    logp, old = np.where(x > 0, np.float32(0), x), np.where(x > 0, -x, np.float32(0))
    masks = {"all": np.ones(x.shape, bool)}
    values = np.resize(np.array([1.0, -2.0, 0.0, np.nan, -np.inf]), x.shape)
    for A in (values, np.ones_like(values), np.zeros_like(values)):
        check(engine, logp, old, masks, A)
        check(engine, logp, old, masks, A, truncate=(0.0, 3.0))
        check(engine, logp, old, masks, A, truncate=(0.25, math.inf))


def test_what_a_mask_leaves_out_changes_nothing(engine, rng):
    logp, old, masks = tokens(rng, (4, 50))
    A = rng.standard_normal((4, 50))
    inside = masks.pop("some")
    clean = engine.stats(logp, old, {"s": inside}, advantages=A, **EVERYTHING).to_dict()
    for array, rubbish in ((logp, np.nan), (old, np.inf), (A, np.nan)):
        array[~inside] = rubbish
    assert engine.stats(logp, old, {"s": inside}, advantages=A, **EVERYTHING).to_dict() == pytest.approx(
        clean, nan_ok=True, rel=1e-12
    )
    with_base = engine.stats(logp, old, {"s": np.ones_like(inside)}, mask=inside, advantages=A, **EVERYTHING)
    assert with_base.to_dict() == pytest.approx(clean, nan_ok=True, rel=1e-12)


def test_ids_are_masks(engine, rng):
    logp, old, _ = tokens(rng, (6, 40))
    A = rng.standard_normal(6)
    ids = rng.integers(-1, 3, (6, 40))
    by_id = engine.stats(logp, old, slice_ids=ids, names=["a", "b"], advantages=A, **EVERYTHING).to_dict()
    masks = {"a": ids == 0, "b": ids == 1}
    by_mask = engine.stats(logp, old, masks, advantages=A, **EVERYTHING).to_dict()
    assert by_id.pop("n_out_of_range") == np.count_nonzero(ids == 2)
    del by_mask["n_out_of_range"]
    assert by_id == pytest.approx(by_mask, nan_ok=True, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_strides_and_grad(dtype):
    wide = torch.randn(40, 30).to(dtype)
    logp, old = wide.t().requires_grad_(), torch.randn(30, 40).to(dtype)
    A = torch.randn(30).to(dtype).requires_grad_()
    mask = torch.ones(40)
    stats = pyrlstats.slice_stats(logp, old, {"m": mask}, advantages=A, **EVERYTHING)
    arrays = [t.detach().double().numpy().reshape(-1) for t in (logp, old, A[:, None].expand(30, 40))]
    if dtype != torch.float64:
        arrays = [array.astype(np.float32) for array in arrays]
    member, sequence = np.ones(1200, bool), np.repeat(np.arange(30), 40)
    assert_right(stats.to_dict(), "m", truth(arrays[0], arrays[1], member, sequence, 30, arrays[2], EVERYTHING))


def test_a_token_that_the_new_policy_rules_out_makes_no_update(engine):
    x = np.float32([-np.inf, 0.0])
    stats = engine.stats(x, np.zeros_like(x), advantages=np.float32([1.0, 1.0]))["all"]
    assert (stats.update_abs_mean, stats.update_ess_fraction, stats.update_abs_p50) == (1.0, 1.0, 1.0)


def test_one_row_a_value_or_one_token(rng):
    logp, old, _ = tokens(rng, (7, 7))
    A = rng.standard_normal(7)
    rows = pyrlstats.slice_stats(logp, old, advantages=A).to_dict()
    for same in (A[:, None], np.repeat(A[:, None], 7, 1)):  # walked in another order: sums differ in the last bits
        assert rows == pytest.approx(pyrlstats.slice_stats(logp, old, advantages=same).to_dict(), rel=1e-12)
    flat = pyrlstats.slice_stats(logp.reshape(-1), old.reshape(-1), advantages=np.repeat(A, 7)).to_dict()
    assert rows == pytest.approx(flat, rel=1e-12)


def accumulator(**changed: Any) -> pyrlstats.SliceAccumulator:
    return pyrlstats.SliceAccumulator(["all", "some", "none"], advantages=True, **(EVERYTHING | changed))


def test_merging_is_pooling(rng):
    logp, old, masks = tokens(rng, (12, 40), 3.0)
    A = rng.standard_normal(12)
    whole = pyrlstats.slice_stats(logp, old, masks, advantages=A, **EVERYTHING)
    acc = accumulator()
    parts = []
    for rows in (slice(0, 5), slice(5, 6), slice(6, 12)):
        piece = {name: mask[rows] for name, mask in masks.items()}
        acc.update(logp[rows], old[rows], piece, advantages=A[rows])
        parts.append(pyrlstats.slice_stats(logp[rows], old[rows], piece, advantages=A[rows], **EVERYTHING))
    pooled = sum(parts)
    for other in (acc.compute(), pooled, parts[2].merge(parts[:2]), copy.deepcopy(acc).compute()):
        assert other.to_dict() == pytest.approx(whole.to_dict(), nan_ok=True, rel=1e-6)
        assert np.array_equal(other.updates.state.histogram, whole.updates.state.histogram)
    assert acc.reset().compute()["all"].n_sequences == 0
    assert math.isnan(acc.compute()["all"].update_ess_fraction)


def test_saved_and_read_back(rng, tmp_path):
    logp, old, masks = tokens(rng, (4, 40))
    stats = pyrlstats.slice_stats(logp, old, masks, advantages=np.ones(4), **EVERYTHING)
    columnar = pytest.importorskip("pyrlstats.columnar")
    columnar.write_parquet(tmp_path / "steps.parquet", [(3, stats), (4, stats + stats)])
    steps = columnar.read_parquet(tmp_path / "steps.parquet")
    for back in (
        pyrlstats.SliceStats.from_bytes(stats.to_bytes()),
        pyrlstats.SliceStats.from_state_dict(stats.state_dict()),
        pickle.loads(pickle.dumps(stats)),
        steps[0][1],
    ):
        assert np.array_equal(back.state.buffer, stats.state.buffer)
        assert back.state.groups == stats.state.groups
        assert back.sequences["all"].ess_fraction == stats.sequences["all"].ess_fraction
    assert steps[1][1]["all"].n_sequences == 8


def test_what_was_not_asked_for_is_not_there(rng):
    logp, old, masks = tokens(rng, (4, 40))
    plain = pyrlstats.slice_stats(logp, old, masks)
    assert {key.split("/")[-1] for key in plain.to_dict() if "_p" not in key} <= {*SCALARS, "n_out_of_range"}
    for read in (
        lambda: plain["all"].perplexity_ess_fraction,
        lambda: plain["all"].sequence_perplexity,
        lambda: plain.updates,
        lambda: plain.sequences,
    ):
        with pytest.raises(AttributeError, match=r"not asked for: .* adds it"):
            read()
    with pytest.raises(ValueError, match="different groups"):
        plain + pyrlstats.slice_stats(logp, old, masks, entropy=True)
    with pytest.raises(ValueError, match=r"different groups .*: \['truncation \(0.5, 2.0\)'\] and .*\(0.5, 3.0\)"):
        pyrlstats.slice_stats(logp, old, truncate=(0.5, 2)) + pyrlstats.slice_stats(logp, old, truncate=(0.5, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truncate": (2.0, 0.5)}, r"truncate must satisfy 0 <= lo < hi"),
        ({"truncate": 2.0}, r"truncate must be two numbers"),
        ({"truncate": (math.nan, 2.0)}, r"truncate must satisfy"),
        ({"truncate": (0.0, 1e-200)}, r"truncate must have bounds from 1e-100 to 1e100, .* 0 and inf for none"),
        ({"truncate": (0.5, 1e200)}, r"truncate must have bounds"),
        ({"advantages": np.ones(4), "dual_clip": 1.0}, r"dual_clip must be above 1"),
        ({"advantages": np.ones(3)}, r"one value a row: 4 are wanted .*, got 3"),
        ({"advantages": np.ones((4, 7))}, r"advantages must broadcast"),
        ({"cu_seqlens": [0, 5]}, r"cu_seqlens needs packed tokens"),
    ],
)
def test_bad_options(rng, options, message):
    logp, old, _ = tokens(rng, (4, 40))
    with pytest.raises(ValueError, match=message):
        pyrlstats.slice_stats(logp, old, **options)


def test_bad_types(rng):
    logp, old, _ = tokens(rng, (4, 40))
    with pytest.raises(TypeError, match="advantages must have one of the dtypes"):
        pyrlstats.slice_stats(logp, old, advantages=np.ones(4, int))
    with pytest.raises(TypeError, match="entropy must be True or False"):
        pyrlstats.slice_stats(logp, old, entropy="yes")
    with pytest.raises(TypeError, match="cu_seqlens"):
        pyrlstats.slice_stats(logp.reshape(-1), old.reshape(-1), cu_seqlens=np.array([0.0, 5.0]))


def test_advantages_as_tensors_beside_arrays(rng):
    logp, old, _ = tokens(rng, (4, 40))
    A = torch.randn(4).to(torch.bfloat16)
    got = pyrlstats.slice_stats(logp, old, advantages=A)
    assert got.to_dict() == pyrlstats.slice_stats(logp, old, advantages=A.float().numpy()).to_dict()
    accumulator = pyrlstats.SliceAccumulator(["all"], advantages=True).update(logp, old, advantages=A)
    assert accumulator.compute().to_dict() == got.to_dict()


@pytest.mark.parametrize("ends", [[0.0, 160.0], [False, True], [0, None], np.array([0, 2.5])])
def test_boundaries_must_be_integers(rng, ends):
    logp, old, _ = tokens(rng, (160,))
    with pytest.raises(TypeError, match="cu_seqlens must hold integers"):
        pyrlstats.slice_stats(logp, old, cu_seqlens=ends)
    with pytest.raises(ValueError, match="cu_seqlens must hold one integer a boundary"):
        pyrlstats.slice_stats(logp, old, cu_seqlens=[0, [1, 2]])


@pytest.mark.parametrize("options", [{"sequences": "no", "cu_seqlens": [0, 160]}, {"sequences": 0}, {"entropy": None}])
def test_switches_are_those_of_an_accumulator(rng, options):
    logp, old, _ = tokens(rng, (160,))
    with pytest.raises(TypeError, match=r"(sequences|entropy) must be True or False, got ('no'|0|None)"):
        pyrlstats.slice_stats(logp, old, **options)
    with pytest.raises(ValueError, match="dual_clip must be above 1"):
        pyrlstats.slice_stats(logp, old, dual_clip=0.5)


@pytest.mark.parametrize("ends", [[0, 7, 5, 160], [-1, 160], [0, 161]])
def test_bad_boundaries(rng, ends):
    logp, old, _ = tokens(rng, (160,))
    with pytest.raises(ValueError, match="cu_seqlens must ascend and lie in 0 to the number of tokens, 160"):
        pyrlstats.slice_stats(logp, old, cu_seqlens=ends)
    # those of a device are not looked at: they never leave the tokens
    stats = pyrlstats.slice_stats(*map(torch.from_numpy, (logp, old)), cu_seqlens=torch.tensor(ends))
    assert stats["all"].n_sequences + stats["all"].n_sequences_empty == len(ends) - 1
    with pytest.raises(ValueError, match="sequences need to be told apart"):
        pyrlstats.slice_stats(logp, old, sequences=True)


def test_an_update_that_lacks_something_counts_nothing(rng):
    logp, old, masks = tokens(rng, (4, 40))
    acc = accumulator()
    with pytest.raises(ValueError, match="advantages are needed"):
        acc.update(logp, old, masks)
    with pytest.raises(ValueError, match="sequences need to be told apart"):
        acc.update(*(a.reshape(-1) for a in (logp, old)), {n: m.reshape(-1) for n, m in masks.items()},
                   advantages=np.ones(160))  # fmt: skip
    assert acc.compute()["all"].n_tokens == 0
    plain = pyrlstats.SliceAccumulator(["all"])
    with pytest.raises(ValueError, match="advantages were given but are not kept"):
        plain.update(logp, old, advantages=np.ones(4))
    with pytest.raises(ValueError, match="sequences are not kept"):
        plain.update(logp.reshape(-1), old.reshape(-1), cu_seqlens=[0, 160])
    assert plain.compute()["all"].n_tokens == 0


def test_no_tokens_and_no_sequences():
    none = np.zeros((0, 5), np.float32)
    stats = pyrlstats.slice_stats(none, none, advantages=np.zeros(0), **EVERYTHING)
    assert stats["all"].n_sequences == stats["all"].n_sequences_empty == 0
    assert math.isnan(stats["all"].masked_ess_fraction)
    flat = torch.zeros(3)
    stats = pyrlstats.slice_stats(flat, flat, cu_seqlens=torch.tensor([0]))
    assert stats["all"].n_sequences == 0
    assert stats["all"].n_tokens == 3
    empty_rows = torch.zeros(3, 0)
    assert pyrlstats.slice_stats(empty_rows, empty_rows, sequences=True)["all"].n_sequences_empty == 3


def test_compiled(rng):
    logp, old, masks = (torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in tokens(rng, (6, 20)))
    masks = {name: torch.from_numpy(mask) for name, mask in masks.items()}
    compiled, eager = accumulator(device="cpu"), accumulator(device="cpu")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(logp: Any, old: Any, masks: Any, A: Any) -> None:
        compiled.update(logp, old, masks, advantages=A)

    for _ in range(2):
        step(logp, old, masks, logp[:, 0])
        eager.update(logp, old, masks, advantages=logp[:, 0])
    assert torch.equal(compiled.compute().state.buffer, eager.compute().state.buffer)


def test_fading(rng):
    """Decayed statistics of equal steps are those of one."""
    from pyrlstats.windows import DecayedStats

    logp, old, masks = tokens(rng, (6, 20))
    stats = pyrlstats.slice_stats(logp, old, masks, advantages=np.ones(6), **EVERYTHING)
    decayed = DecayedStats(0.5)
    for _ in range(4):
        decayed.push(stats)
    wanted = stats.to_dict()
    got = decayed.to_dict()
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        # quantiles are interpolated by weight, and few weigh less
        if not any(part in key for part in ("/n_", "_p50", "_p9", "_p1", "_p0")) and not key.endswith(("ess", "range")):
            assert got[key] == pytest.approx(value, rel=1e-9, nan_ok=True), key
    assert got["all/n_sequences"] == pytest.approx(6 * (1 + 0.5 + 0.25 + 0.125))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40),
    st.floats(-300, 300, width=32),
)
def test_effective_sizes_lie_where_they_must(values, offset):
    x = np.array(values, np.float32)
    zeros = np.zeros_like(x)
    stats = pyrlstats.slice_stats(x, zeros, entropy=True, truncate=(0.5, 2.0))["all"]
    assert 1 / len(x) <= stats.perplexity_ess_fraction <= 1
    assert stats.ess_fraction <= stats.perplexity_ess_fraction * (1 + 1e-6)  # Renyi entropies fall with their order
    assert 0 <= stats.masked_ess_fraction <= 1 - stats.truncated_fraction
    assert 0.5 <= stats.clamped_ratio_mean <= 2.0
    moved = pyrlstats.slice_stats((x + np.float32(offset)).astype(np.float32), zeros, entropy=True)["all"]
    exact = reference.statistics((x + np.float32(offset)).astype(np.float32))["perplexity_ess_fraction"]
    assert moved.perplexity_ess_fraction == pytest.approx(exact, rel=1e-6)
