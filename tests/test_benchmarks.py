"""The benchmark suite itself: its gate catches what is wrong, and its documents survive their ways."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pyrlstats.benchmarks import (  # noqa: E402
    compare,
    gate,
    kernels,
    machine,
    markdown,
    memory,
    registry,
    roofline,
    run,
    suite,
    tables,
)
from pyrlstats.benchmarks.contenders import ALL  # noqa: E402
from pyrlstats.benchmarks.exact import STATISTICS, Tolerance, errors, exact  # noqa: E402
from pyrlstats.benchmarks.inputs import BASE, DISTRIBUTIONS, Inputs, Spec, pool  # noqa: E402
from pyrlstats.benchmarks.registry import Case  # noqa: E402

from pyrlstats import Layout, reference  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of contenders, about empty slices and the like

TOKENS = 1 << 16


def inputs_of(spec: Spec, tokens: int = TOKENS, micro_batches: int = 1) -> Inputs:
    return next(pool(spec, tokens, "cpu").cut(tokens, micro_batches))


def verdict(name: str, inputs: Inputs) -> str | None:
    """What the gate says about one contender; skips where it cannot run."""
    contender = ALL[name]
    reason = contender.reason_to_skip(inputs)
    if reason is not None:
        pytest.skip(reason)
    launch, collect = contender.make(inputs)
    return gate.check(collect(launch(inputs)), exact(inputs), contender.tolerance)


class TestGate:
    def test_catches_the_logspace_histogram_of_the_ratio(self) -> None:
        """Bins of 7.5 % say nothing about ratios that differ from 1 by 0.3 %."""
        said = verdict("trainer: logspace histogram", inputs_of(Spec(distribution="gauss 3e-3")))
        assert said is not None
        assert "log_ratio_p99 is 0.070" in said

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_catches_histc_in_half_precision(self, dtype: str) -> None:
        """Its counts are half precision too: adding 1 to 256 (bfloat16) or 2048 (float16) changes nothing."""
        said = verdict("torch.histc, half precision", inputs_of(Spec(dtype=dtype), 1 << 19))
        assert said is not None
        assert "n_binned is" in said

    def test_catches_k3_that_cancels(self) -> None:
        inputs = inputs_of(Spec(2, distribution="gauss 1e-4"))
        said = verdict("torch, boolean index, naive k3", inputs)
        assert said is not None
        assert said.startswith("kl_k3 is")
        assert verdict("torch, boolean index", inputs) is None

    def test_catches_averages_of_maxima(self) -> None:
        said = verdict("torch, .item() and average", inputs_of(Spec(2), micro_batches=4))
        assert said is not None

    @pytest.mark.parametrize("name", ["torch.histc", "numpy.histogram", "fast-histogram", "boost-histogram, linear"])
    def test_catches_linear_bins_on_a_heavy_tail(self, name: str) -> None:
        assert verdict(name, inputs_of(Spec(distribution="heavy tail"), 1 << 20)) is not None

    @pytest.mark.parametrize("distribution", DISTRIBUTIONS)
    @pytest.mark.parametrize("masks", ["runs", "random", "mostly empty", "none", "ids"])
    def test_lets_ours_pass(self, distribution: str, masks: str) -> None:
        spec = Spec(1 if masks == "none" else 3, distribution=distribution, masks=masks)
        assert verdict("pyrlstats", inputs_of(spec)) is None

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
    def test_lets_ours_pass_in_every_dtype(self, dtype: str) -> None:
        assert verdict("pyrlstats", inputs_of(Spec(2, dtype))) is None
        assert verdict("pyrlstats", inputs_of(Spec(2, dtype, transposed=True))) is None
        assert verdict("pyrlstats, micro-batches", inputs_of(Spec(2, dtype), micro_batches=4)) is None

    @pytest.mark.parametrize(
        "name",
        [name for name, contender in ALL.items() if "cpu" in contender.devices and "compile" not in name],
    )
    def test_lets_everybody_pass_on_gaussian_data(self, name: str) -> None:
        """No contender is set up to fail: only those fail here that cannot hold what they state."""
        dtype = "bfloat16" if "half" in name else "float32"
        said = verdict(name, inputs_of(Spec(2, dtype), micro_batches=4))
        hopeless = ("trainer: logspace histogram", "torch, .item() and average", "torch.histc, half precision")
        assert (said is not None) == (name in hopeless)

    def test_an_error_is_a_violation_exactly_beyond_the_tolerance(self) -> None:
        inputs = inputs_of(Spec(1))
        answer = exact(inputs)
        truth = answer.values["abs_log_ratio_p99"][0]
        for name, value, right in (
            ("abs_log_ratio_p99", truth * 1.04, True),
            ("abs_log_ratio_p99", truth * 1.08, False),
            ("abs_log_ratio_p99", math.nan, False),
            ("n_finite", answer.values["n_finite"][0], True),
            ("n_finite", answer.values["n_finite"][0] + 1, False),
            ("ess_fraction", answer.values["ess_fraction"][0] * 1.009, True),
            ("ess_fraction", answer.values["ess_fraction"][0] * 0.98, False),
        ):
            assert (gate.check({name: [value]}, answer, Tolerance()) is None) == right, (name, value)
        assert gate.check({"ess_fraction": []}, answer, Tolerance()) is not None

    def test_sketches_are_held_to_what_their_library_states(self) -> None:
        datasketches = pytest.importorskip("datasketches")
        for k in (200, 2000):
            stated = datasketches.kll_floats_sketch.get_normalized_rank_error(k, False)
            assert ALL[f"DataSketches KLL, k={k}"].tolerance.rank == pytest.approx(stated, rel=3e-3)
        sketch = datasketches.req_floats_sketch(50, True)
        sketch.update(np.random.default_rng(0).normal(size=1 << 20).astype(np.float32))
        for q in (0.5, 0.99, 0.999):
            stated = (sketch.get_rank_upper_bound(q, 3) - q) / (1.0 - q)
            assert ALL["DataSketches REQ, k=50"].tolerance.tail == pytest.approx(stated, rel=3e-3)

    def test_a_rank_tolerance_admits_the_order_statistics_of_these_ranks(self) -> None:
        ordered = np.arange(1000.0)
        assert gate.order_statistics(ordered, 0.99) == (988.0, 990.0)
        low, high = gate.order_statistics(ordered, 0.99, rank=0.005)
        assert low == pytest.approx(983, abs=2)
        assert high == pytest.approx(995, abs=2)


class TestExact:
    def test_agrees_with_the_reference(self) -> None:
        inputs = inputs_of(Spec(2, distribution="heavy tail"))
        answer = exact(inputs)
        x = reference.log_ratio(inputs.logp.numpy(), inputs.old_logp.numpy())
        for index, mask in enumerate(inputs.members()):
            expected = reference.statistics(x[mask.numpy()])
            for name in STATISTICS:
                if name in expected:
                    assert answer.values[name][index] == pytest.approx(expected[name], rel=1e-9), name
            magnitude = np.abs(x[mask.numpy()]).astype(np.float64)
            assert answer.values["abs_log_ratio_p99_9"][index] == reference.quantile(magnitude, 0.999)

    def test_errors_are_relative_and_the_largest_of_the_slices(self) -> None:
        answer = exact(inputs_of(Spec(2)))
        results = {"kl_k3": [answer.values["kl_k3"][0], answer.values["kl_k3"][1] * 1.5]}
        assert errors(results, answer) == {"kl_k3": pytest.approx(0.5)}


class TestInputs:
    @pytest.mark.parametrize("masks", ["runs", "random", "mostly empty", "none", "ids"])
    def test_bytes_are_those_of_the_operands(self, masks: str) -> None:
        inputs = inputs_of(Spec(1 if masks == "none" else 4, "bfloat16", masks=masks))
        assert sum(words.nbytes for words in inputs.words) == inputs.n_bytes

    def test_are_the_same_every_time(self) -> None:
        first = inputs_of(Spec(2))
        pool.cache_clear()
        again = inputs_of(Spec(2))
        assert first.logp is not again.logp
        assert torch.equal(first.logp, again.logp)
        assert all(map(torch.equal, first.members(), again.members()))

    def test_long_ones_repeat_the_base(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pyrlstats.benchmarks.inputs.BASE", 1 << 14)
        pool.cache_clear()
        inputs = inputs_of(Spec(1), 1 << 16)
        head, times = inputs.head()
        assert (head.tokens, times) == (1 << 14, 4)
        assert torch.equal(inputs.logp.reshape(4, -1)[3], head.logp.reshape(-1))
        whole = reference.log_ratio(inputs.logp.numpy(), inputs.old_logp.numpy())[inputs.members()[0].numpy()]
        expected = reference.statistics(whole)
        answer = exact(inputs)
        assert answer.values["n_finite"] == [expected["n_finite"]]
        assert answer.values["ess_fraction"] == [pytest.approx(expected["ess_fraction"], rel=1e-12)]
        pool.cache_clear()
        assert BASE == 1 << 24

    def test_micro_batches_hold_every_token_once(self) -> None:
        inputs = inputs_of(Spec(2), micro_batches=4)
        assert torch.equal(torch.cat([part.logp for part in inputs.parts]), inputs.logp)


@pytest.mark.parametrize("threads", [1, 2])
def test_readers_see_every_byte(threads: int) -> None:
    inputs = inputs_of(Spec(2), 1 << 19)
    inputs.logp.view(torch.int32)[-1, -1] = 0x7FFFFFFF
    whole = max(int(np.bitwise_or.reduce(words.numpy())) for words in inputs.words)
    for reader in roofline.readers("cpu", threads):
        value = reader.read(inputs)
        if "NumPy" in reader.name:
            assert value == whole
        else:
            assert [int(total) for total in value] == [int(words.numpy().sum()) for words in inputs.words]


def test_peak_memory_is_what_a_call_allocates() -> None:
    size = 64 << 20
    peak = memory.peak_extra_bytes(lambda: np.ones(size, np.uint8).sum(), "cpu")
    if peak is None:
        pytest.skip("this system does not tell")
    assert size <= peak + (1 << 20)
    assert peak < 1.5 * size


def small(case: Case, **changes: Any) -> Case:
    return dataclasses.replace(case, tokens=min(case.tokens, TOKENS), seconds=0.01, **changes)


@pytest.fixture(scope="module")
def document() -> suite.Document:
    """A run of two small cases."""
    chosen = [
        small(
            Case("statistics: tiny", "statistics", Spec(2), TOKENS, ("pyrlstats", "torch, mask multiply"), memory=True)
        ),
        small(
            Case(
                "quantiles: tiny",
                "quantiles",
                Spec(1, distribution="gauss 3e-3"),
                TOKENS,
                ("pyrlstats", "numpy.partition", "trainer: logspace histogram", "CuPy sort"),
            )
        ),
        small(Case("tokens: tiny", "tokens", Spec(1), TOKENS, ("pyrlstats", "numpy.partition"))),
    ]
    patch = pytest.MonkeyPatch()
    patch.setattr(suite, "cases", lambda *_: chosen)
    patch.setattr(suite, "_extras", lambda *_: {})
    patch.setattr(run, "last_level_cache", lambda: 1 << 20)
    try:
        made = suite.run("cpu", quick=True)
    finally:
        patch.undo()
    return json.loads(json.dumps(suite.rounded(made)))


class TestDocument:
    def test_shows_no_time_for_what_is_wrong(self, document: suite.Document) -> None:
        rows = {row["contender"]: row for row in document["cases"][1]["rows"]}
        assert rows["trainer: logspace histogram"]["status"] == "wrong"
        assert "seconds" not in rows["trainer: logspace histogram"]
        assert rows["CuPy sort"]["status"] == "skipped"
        assert rows["pyrlstats"]["seconds"]["median"] > 0

    def test_every_row_of_ours_has_its_fraction_of_the_roofline(self, document: suite.Document) -> None:
        fractions = [
            row["roofline_fraction"] for case in document["cases"] for row in case["rows"] if row["family"] == "ours"
        ]
        assert len(fractions) == 3
        assert all(fraction > 0 for fraction in fractions)

    def test_names_the_machine(self, document: suite.Document) -> None:
        line = machine.line(document["machine"])
        assert torch.__version__ in line
        assert "commit" in line

    def test_time_limit_skips_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case = Case("statistics: never", "statistics", Spec(1), TOKENS, ("pyrlstats",))
        monkeypatch.setattr(suite, "cases", lambda *_: [case])
        monkeypatch.setattr(suite, "_extras", lambda *_: {})
        made = suite.run("cpu", quick=True, time_limit=-1.0)
        assert made["cases"] == []
        assert made["skipped"] == [{"name": "statistics: never", "reason": "the time limit of -1 s was over"}]

    def test_is_saved_drawn_and_shown(self, document: suite.Document, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        pytest.importorskip("jinja2")
        typer = pytest.importorskip("typer.testing")
        pytest.importorskip("rich")
        from pyrlstats.cli import build_app

        app = build_app()
        path = tmp_path / "result.json"
        suite.save(document, path)
        assert suite.load(path) == document
        shown = typer.CliRunner().invoke(app, ["bench", "show", str(path)])
        assert shown.exit_code == 0, shown.output
        assert "trainer: logspace histogram: wrong" in shown.output
        assert path.with_suffix(".png").stat().st_size > 10_000
        page = path.with_suffix(".html").read_text()
        assert "log_ratio_p99 is 0.07" in page
        compared = typer.CliRunner().invoke(app, ["bench", "compare", str(path), str(path)])
        assert compared.exit_code == 0, compared.output
        assert "1.000" in compared.output
        path.write_text("{}")
        refused = typer.CliRunner().invoke(app, ["bench", "compare", str(path), str(tmp_path / "missing.json")])
        assert refused.exit_code == 1
        assert "is no result of this suite" in refused.output

    def test_another_schema_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "old.json").write_text('{"schema": 0}')
        with pytest.raises(ValueError, match="schema"):
            suite.load(tmp_path / "old.json")

    def test_failed_contenders_say_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def make(inputs: Inputs) -> Any:
            raise RuntimeError("no such luck\nsecond line")

        broken = dataclasses.replace(ALL["numpy.partition"], make=make)
        monkeypatch.setitem(run.ALL, "numpy.partition", broken)
        case = Case("tokens: broken", "tokens", Spec(1), TOKENS, ("numpy.partition", "pyrlstats"), seconds=0.01)
        rows = run.run_case(case, "cpu", {})["rows"]
        assert rows[0]["reason"] == "RuntimeError: no such luck"
        assert rows[1]["status"] == "ok"


class TestCompare:
    def test_tells_noise_from_change(self, document: suite.Document) -> None:
        after = json.loads(json.dumps(document))
        row = after["cases"][0]["rows"][0]
        for name in ("seconds", "launch_seconds"):
            row[name] = {"median": 10.0, "p20": 9.9, "p80": 10.1, "samples": 9}
            document["cases"][0]["rows"][0][name] = {"median": 20.0, "p20": 19.0, "p80": 21.0, "samples": 9}
        table = compare.compare(document, after)
        assert table.rows[0][5:] == ["0.500", "±6.0%", "faster"]
        assert all(cells[-1] == "" for cells in table.rows[2:])
        assert {cells[1] for cells in table.rows} == {"pyrlstats"}
        assert len(compare.compare(document, after, everyone=True).rows) > len(table.rows)


class TestMarkdown:
    def test_renders_between_the_markers_only(self, document: suite.Document, tmp_path: Path) -> None:
        suite.save(document, tmp_path / "cpu.json")
        page = tmp_path / "page.md"
        page.write_text(
            "before\n<!-- benchmarks:cpu-headline -->\nold\n<!-- /benchmarks:cpu-headline -->\n"
            "<!-- benchmarks:gpu-all -->\n<!-- /benchmarks:gpu-all -->\nafter\n"
        )
        assert markdown.render((page,), tmp_path) == [page]
        text = page.read_text()
        assert "old" not in text
        assert text.startswith("before\n")
        assert text.endswith("after\n")
        assert "| **pyrlstats** |" in text
        assert "No run is committed yet" in text
        assert markdown.render((page,), tmp_path) == []

    def test_command_draws_its_own_results_only(
        self, document: suite.Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("matplotlib")
        typer = pytest.importorskip("typer.testing")
        from pyrlstats.benchmarks.cli import app

        suite.save(document, tmp_path / "cpu.json")
        (tmp_path / "kernels.json").write_text("[]")  # of another benchmark
        monkeypatch.setattr(markdown, "results_folder", lambda: tmp_path)
        monkeypatch.setattr(markdown, "targets", lambda: ())
        rendered = typer.CliRunner().invoke(app, ["render"])
        assert rendered.exit_code == 0, rendered.output
        assert sorted(path.name for path in tmp_path.glob("*.png")) == ["cpu.png"]

    def test_kernel_rates_come_from_their_results(self, tmp_path: Path) -> None:
        machine = {"gpu": "some GPU", "python": "3.12", "torch": "2.11", "triton": "3.6"}
        rows = [
            {"case": name, "gtok_s": 100.0 + index, "gb_s": 900.0, "of_R": 0.5}
            for index, name in enumerate((*kernels.HEADLINE, "another"))
        ]
        accuracy = [{"case": "gauss", **dict.fromkeys(("near_x", "near_x2", "far_x", "far_x2"), 1e-15), "far_w": 2e-8}]
        result = {"machine": machine, "rows": rows, "accuracy": accuracy, "commit": "abc", "command": "measure"}
        (tmp_path / "h100_kernels.json").write_text(json.dumps(result))
        page = tmp_path / "page.md"
        marks = "<!-- benchmarks:{0} -->\n<!-- /benchmarks:{0} -->\n"
        page.write_text(marks.format("gpu-kernels-headline") + marks.format("gpu-kernels"))
        markdown.render((page,), tmp_path)
        few, every = page.read_text().split("<!-- /benchmarks:gpu-kernels-headline -->")
        assert "| f32, 4 bool masks | 102 | 900 | 50% |" in few
        assert "another" not in few
        assert f"| another | {100 + len(kernels.HEADLINE)} | 900 | 50% |" in every
        assert "within 1.0e-15 of float64 ones, all others within 2.0e-08" in every

    @pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md"])
    def test_committed_pages_are_rendered_from_committed_results(self, name: str, tmp_path: Path) -> None:
        root = Path(__file__).resolve().parents[1]
        copy = tmp_path / "page.md"
        copy.write_text((root / name).read_text())
        assert "<!-- benchmarks:cpu-" in copy.read_text()
        assert markdown.render((copy,), root / "benchmarks" / "results") == []

    @pytest.mark.parametrize("arguments", [["render"], ["--readme"]])
    def test_needs_a_source_tree_and_says_so_before_it_measures(
        self, arguments: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        typer = pytest.importorskip("typer.testing")
        cli = pytest.importorskip("pyrlstats.cli")
        monkeypatch.setattr(machine, "source_tree", lambda: None)
        monkeypatch.setattr(suite, "run", lambda *_, **__: pytest.fail("measured"))
        said = typer.CliRunner().invoke(cli.build_app(), ["bench", *arguments])
        assert said.exit_code == 1
        assert "installed without one: run python -m benchmarks in a checkout" in said.output

    def test_unknown_sections_are_refused(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text("<!-- benchmarks:cpu-nonsense -->\n<!-- /benchmarks:cpu-nonsense -->\n")
        with pytest.raises(ValueError, match="nonsense"):
            markdown.render((page,), tmp_path)


class TestRegistry:
    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    @pytest.mark.parametrize("quick", [True, False])
    def test_cases_have_names_of_their_own_and_known_contenders(self, device: str, quick: bool) -> None:
        found = registry.cases(device, quick, threads=2)
        assert len({case.name for case in found}) == len(found)
        for case in found:
            assert set(case.contenders) <= ALL.keys(), case.name
            assert any(ALL[name].family == "ours" for name in case.contenders), case.name

    def test_cover_the_axes(self) -> None:
        found = registry.cases("cuda", quick=False)
        assert {case.tokens for case in found} >= {4096, 1 << 30}
        assert {case.spec.slices for case in found} >= {1, 2, 4, 8, 32}
        assert {case.spec.dtype for case in found} == {"float32", "bfloat16", "float16", "float64"}
        assert {case.spec.distribution for case in found} == set(DISTRIBUTIONS)
        assert {case.spec.masks for case in found} == {"runs", "random", "mostly empty", "none", "ids"}
        assert len({case.spec.layout for case in found} | {Layout()}) == 4

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_quick_runs_keep_every_axis(self, device: str) -> None:
        quick, full = (registry.cases(device, quick, threads=2) for quick in (True, False))
        axes = {case.axis: sum(other.axis == case.axis for other in full) for case in full}
        for axis, cases in axes.items():
            assert sum(case.axis == axis for case in quick) >= min(cases, 1 if axis == "statistics" else 2), axis
        assert {case.memory for case in quick} == {True, False}
        # what the gate is there to catch
        assert {"trainer: logspace histogram", "torch, boolean index, naive k3"} <= {
            name for case in quick for name in case.contenders
        }

    def test_every_contender_is_in_a_case(self) -> None:
        named = {
            name for device in ("cpu", "cuda") for case in registry.cases(device, False, 2) for name in case.contenders
        }
        assert named == set(ALL)


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.56e-5, "45.6 µs"), (3e-9, "0.003 µs")]
)
def test_seconds_have_three_digits(value: float | None, text: str) -> None:
    assert tables.seconds(value) == text


def test_training_step_measures_every_variant() -> None:
    from pyrlstats.benchmarks import training_step

    size = training_step.Size(16, 1, 2, 32, 4, 128, 2, 2, torch.float32)
    measured = training_step.measure("cpu", size=size)
    assert [row["variant"] for row in measured["rows"]] == [
        "pyrlstats, read at the end of the step",
        training_step.AGAIN,
        "torch, quantiles at the end of the step",
        "torch, .item() every micro-batch",
    ]
    assert measured["tokens"] == 1024
    assert tables.of_training_step(measured).rows


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_collectives_agree() -> None:
    from pyrlstats.benchmarks import collective

    rows = {row["contender"]: row for row in collective.measure(tokens=4096, rounds=2)["rows"]}
    assert rows["pyrlstats all_reduce"]["status"] == "ok"
    assert rows["radix select, 4 rounds"]["error"] == 0.0
    assert all(row["bytes"] > 0 for row in rows.values())
