"""The adapter with the real torchmetrics, on one and on two processes (the latter in test_distributed.py)."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch

from pyrlstats import Layout, slice_stats

torchmetrics = pytest.importorskip("torchmetrics")
from pyrlstats.integrations.torchmetrics import SliceMetric  # noqa: E402

NAMES = ["all", "some"]


def tokens(seed: int) -> tuple[Any, Any, dict[str, Any]]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(50, generator=rng)
    return x, torch.zeros(50), {"some": torch.rand(50, generator=rng) < 0.3, "all": torch.ones(50)}


def wanted(*seeds: int) -> dict[str, float]:
    batches = [tokens(seed) for seed in seeds]
    masks = {name: torch.cat([masks[name] for _, _, masks in batches]) for name in NAMES}
    return slice_stats(
        torch.cat([x for x, _, _ in batches]), torch.cat([old for _, old, _ in batches]), masks
    ).to_dict()


def assert_equal(got: dict[str, float], expected: dict[str, float]) -> None:
    assert got == pytest.approx(expected, rel=1e-6, nan_ok=True)
    for key, value in expected.items():
        if "_p" in key or isinstance(value, int):
            assert got[key] == value


def test_life_cycle() -> None:
    metric = SliceMetric(NAMES)
    metric.update(*tokens(0))
    metric.update(*tokens(1))
    assert_equal(metric.compute(), wanted(0, 1))
    assert_equal(metric(*tokens(2)), wanted(2))  # forward gives the batch's
    assert_equal(metric.compute(), wanted(0, 1, 2))
    assert metric.stats["all"].n_tokens == 150
    metric.reset()
    assert metric.stats["all"].n_tokens == 0
    metric.update(*tokens(1))
    assert_equal(metric.compute(), wanted(1))


def test_merge_state() -> None:
    metric, other = SliceMetric(NAMES), SliceMetric(NAMES)
    metric.update(*tokens(0))
    other.update(*tokens(1))
    metric.compute()  # a kept result must not survive
    metric.merge_state(other)
    assert_equal(metric.compute(), wanted(0, 1))
    metric.merge_state(other.metric_state)
    assert_equal(metric.compute(), wanted(0, 1, 1))
    for different in (SliceMetric(NAMES, clip=(0.1, 0.1)), SliceMetric(["all"]), SliceMetric(NAMES, layout=Layout(4))):
        with pytest.raises(ValueError, match="Expected state variable"):
            metric.merge_state(different)


def test_pickle_copy_and_state_dict() -> None:
    metric = SliceMetric(NAMES)
    metric.persistent(True)
    metric.update(*tokens(0))
    for twin in (pickle.loads(pickle.dumps(metric)), copy.deepcopy(metric), metric.clone()):
        twin.update(*tokens(1))
        assert_equal(twin.compute(), wanted(0, 1))
    assert_equal(metric.compute(), wanted(0))
    loaded = SliceMetric(NAMES)
    loaded.persistent(True)
    loaded.load_state_dict(metric.state_dict())
    assert_equal(loaded.stats.to_dict(), wanted(0))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        SliceMetric(NAMES, clip=(0.1, 0.1)).load_state_dict(metric.state_dict())


def test_a_collection_shares_only_states_of_one_make() -> None:
    """Torchmetrics lets metrics share a state when theirs are equal after the first update."""
    collection = torchmetrics.MetricCollection(
        {"usual": SliceMetric(NAMES), "twin": SliceMetric(NAMES), "wide": SliceMetric(NAMES, clip=(0.5, 2.0))}
    )
    x, old, masks = tokens(0)
    collection.update(old, old, masks)  # nothing clipped by either
    collection.update(x, old, masks)
    result = collection.compute()
    assert result["usual_all/clip_fraction"] == result["twin_all/clip_fraction"]
    assert result["usual_all/clip_fraction"] == np.count_nonzero((x < np.log(0.8)) | (x > np.log(1.2))) / 100
    assert result["wide_all/clip_fraction"] == np.count_nonzero((x < np.log(0.5)) | (x > np.log(3.0))) / 100
    assert sorted(map(sorted, collection.compute_groups.values())) == [["twin", "usual"], ["wide"]]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    monkeypatch.delitem(sys.modules, "pyrlstats.integrations.torchmetrics")
    with pytest.raises(ImportError, match=r"pip install 'pyrlstats\[torchmetrics\]'"):
        importlib.import_module("pyrlstats.integrations.torchmetrics")


def test_inputs_are_checked() -> None:
    metric = SliceMetric(NAMES)
    x, old, masks = tokens(0)
    metric.update(x.numpy(), old.numpy(), {name: mask.numpy() for name, mask in masks.items()})
    assert_equal(metric.compute(), wanted(0))
    with pytest.raises(ValueError, match="missing"):
        metric.update(x, old, {"all": masks["all"]})
    with pytest.raises(ValueError, match="accumulator's device"):
        metric.update(*(t.to("meta") for t in (x, old)), {name: mask.to("meta") for name, mask in masks.items()})
    with pytest.raises(ValueError, match="given twice"):
        SliceMetric(["all", "all"])
    assert metric.stats["all"].n_tokens == 50


def test_optional_statistics() -> None:
    logp, advantages = -torch.rand(4, 30), torch.randn(4)
    old_logp = logp - 0.1 * torch.rand(4, 30)
    metric = SliceMetric(["all"], sequences=True, advantages=True, truncate=(0.5, 2.0))
    metric.update(logp[:2], old_logp[:2], advantages=advantages[:2])
    metric.update(logp[2:], old_logp[2:], advantages=advantages[2:])
    wanted = slice_stats(logp, old_logp, sequences=True, advantages=advantages, truncate=(0.5, 2.0))
    assert metric.compute() == pytest.approx(wanted.to_dict(), rel=1e-6)
    assert pickle.loads(pickle.dumps(metric)).compute() == metric.compute()
