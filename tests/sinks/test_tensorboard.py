"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pyrlstats import slice_stats
from pyrlstats.sinks import Sinks, TensorBoardSink
from pyrlstats.values import value_stats

pytest.importorskip("tensorboard")

# torch's and tensorboard's own imports
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard", "ignore::DeprecationWarning:google")


def read(folder: Any) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    return events.Reload()


def test_scalars_and_histograms(tmp_path: Any, steps: Any, wanted: Callable[[str], Any]) -> None:
    with Sinks([TensorBoardSink(tmp_path)]) as sinks:
        for step, stats in steps:
            sinks.write(step, stats, {"loss": 0.5})
    assert not any(sinks.failures.values())
    events = read(tmp_path)
    numbers = wanted("rl/")
    keys = [*numbers[1], "loss"]
    assert sorted(events.Tags()["scalars"]) == sorted(keys)
    for key in keys:
        got = {event.step: event.value for event in events.Scalars(key)}
        want = {step: np.float32(numbers[step].get(key, 0.5)) for step, _ in steps}
        np.testing.assert_equal(got, want)

    assert sorted(events.Tags()["histograms"]) == [f"rl/{name}/log_ratio" for name in ("all", "positive", "tail")]
    for name in ("all", "positive", "tail"):
        for event, (step, stats) in zip(events.Histograms(f"rl/{name}/log_ratio"), steps, strict=True):
            view, got = stats[name], event.histogram_value
            assert event.step == step
            assert got.num == view.n_finite == sum(got.bucket)
            assert (got.min, got.max) == (view.log_ratio_min, view.log_ratio_max)
            assert got.sum == pytest.approx(float(view.log_ratio_mean * view.n_finite), rel=1e-12)
            assert got.sum_squares == pytest.approx(float(2 * view.kl_k2 * view.n_finite), rel=1e-12)
            assert len(got.bucket) <= 512
            assert (np.diff(got.bucket_limit) > 0).all()
            below = np.cumsum(got.bucket[:-1]) / got.num  # every limit is an edge of our bins, where the CDF is exact
            np.testing.assert_allclose(below, view.cdf(got.bucket_limit[:-1]), rtol=0, atol=1e-12)


def test_the_dashboards_view_of_a_histogram_keeps_every_token(tmp_path: Any, steps: Any) -> None:
    """What the histogram plugin draws: buckets from minimum to maximum, whose counts add up to all tokens."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    sink = TensorBoardSink(tmp_path)
    step, stats = steps[0]
    sink.write(step, {"rl/": stats}, {})
    sink.close()
    (file,) = tmp_path.iterdir()
    drawn = {}
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            drawn[value.tag] = tensor_util.make_ndarray(value.tensor)
    buckets = drawn["rl/tail/log_ratio"]
    assert buckets[0, 0] == stats["tail"].log_ratio_min
    assert buckets[-1, 1] == stats["tail"].log_ratio_max
    assert buckets[:, 2].sum() == stats["tail"].n_finite
    assert (buckets[1:, 0] == buckets[:-1, 1]).all()


def test_a_writer_of_the_users(tmp_path: Any) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    values = value_stats(np.arange(9, dtype=np.float32))
    with Sinks([TensorBoardSink(writer)], prefix="length/") as sinks:
        sinks.write(1, values)
    writer.add_scalar("mine", 1.0, 2)  # still open
    writer.close()
    events = read(tmp_path)
    assert events.Scalars("mine")[0].value == 1.0
    assert events.Scalars("length/all/mean")[0].value == 4.0
    assert events.Histograms("length/all/value")[0].histogram_value.num == 9


def test_a_closed_sink_goes_on_and_histograms_can_be_left_out(tmp_path: Any) -> None:
    stats = slice_stats(np.zeros(4, np.float32), np.zeros(4, np.float32))
    sink = TensorBoardSink(tmp_path, histograms=False)
    for step in (1, 2):
        sink.write(step, {"": stats}, stats.to_dict())
        sink.close()
    events = read(tmp_path)
    assert [event.step for event in events.Scalars("all/n_tokens")] == [1, 2]
    assert events.Tags()["histograms"] == []
