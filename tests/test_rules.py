"""Rules as data: reading them, their complaints, their measures, and that step by step they decide as in a replay."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyrlstats import slice_stats
from pyrlstats.monitor import Monitor, RunReader
from pyrlstats.monitor.alerts import Alert
from pyrlstats.monitor.episodes import Episodes, Finding
from pyrlstats.monitor.history import LONGEST, Rings, robust_spread
from pyrlstats.monitor.rules import Condition, RuleError, RuleSet, builtin_rules, load_rules
from pyrlstats.monitor.rules_evaluation import RuleBook
from pyrlstats.monitor.rules_measures import measured
from pyrlstats.monitor.rules_names import Aliases, as_number, is_statistic, quantile_level, split_key
from pyrlstats.monitor.rules_replay import Table, replay
from pyrlstats.watch.judging import ask_rules
from pyrlstats.watch.runs import open_run

Floats = NDArray[np.float64]

GOOD = """
[[rules]]
name = "mine"
title = "mine is high"
level = "warning"
link = "reward"
when = [{ scalar = "mine", above = 1 }]
"""


def write(folder: Path, text: str, name: str = "rules.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def rules_of(folder: Path, when: str, **fields: Any) -> RuleSet:
    """One rule "r" with these conditions, alone."""
    lines = [f"{name} = {str(value).lower() if isinstance(value, bool) else value!r}" for name, value in fields.items()]
    text = f'[[rules]]\nname = "r"\ntitle = "t"\nlevel = "warning"\nlink = "reward"\nwhen = [{when}]\n'
    return load_rules(write(folder, text + "\n".join(lines)), builtin=False)


def test_builtin_rules_are_about_every_link_of_the_loop() -> None:
    rules = builtin_rules()
    assert len(rules.rules) == 46
    assert {rule.link for rule in rules.rules} == {
        "environment",
        "evaluation",
        "reward",
        "policy update",
        "critic",
        "exploration",
        "freshness",
        "numerics",
        "resources",
    }
    assert [rule.name for rule in rules.rules if rule.level == "stop"] == [
        "many-log-ratios-not-finite",
        "ess-collapse",
        "loss-not-finite",
    ]
    for rule in rules.rules:  # scalars of the built-in rules have aliases
        for condition in rule.when:
            assert condition.scalar is None or condition.scalar in rules.signals


def test_a_file_adds_replaces_and_disables(tmp_path: Path) -> None:
    text = 'disable = ["grad-norm-*", "steps-slower"]\n[constants]\nkl_target = 0.05\n' + GOOD
    text += GOOD.replace('"mine"', '"entropy-floor"', 1).replace("above = 1", "below = 0.1")
    rules = load_rules(write(tmp_path, text))
    names = [rule.name for rule in rules.rules]
    assert len(names) == 46 - 5 + 1
    assert not [name for name in names if name.startswith("grad-norm") or name == "steps-slower"]
    assert next(rule for rule in rules.rules if rule.name == "entropy-floor").title == "mine is high"
    assert rules.constants == {"kl_target": 0.05}


def test_yaml_is_read_as_toml_is(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    text = """
rules:
  - name: mine
    title: mine is high
    level: warning
    link: reward
    when: [{scalar: mine, above: 1}]
"""
    from_yaml = load_rules(write(tmp_path, text, "rules.yaml"), builtin=False)
    assert from_yaml == load_rules(write(tmp_path, GOOD), builtin=False)


BAD = [
    ('level = "warning"', 'level = "loud"', "level: Input should be 'info', 'warning' or 'stop', got 'loud'"),
    ('link = "reward"', 'link = "rewards"', "link: Input should be 'environment'"),
    ('title = "mine is high"\n', "", "title: is missing"),
    ('name = "mine"', 'name = "My Rule"', "name: String should match pattern"),
    ("above = 1", "abov = 1", "when[0].abov: no such field (did you mean 'above'?)"),
    ("above = 1", "above = 'x'", "when[0].above: Input should be a valid number"),
    ("above = 1", "above = nan", "when[0].above: Input should be a finite number"),
    ("above = 1", "above = 1, below = 2", "when[0]: needs either above or below"),
    (", above = 1", "", "when[0]: needs either above or below"),
    ('scalar = "mine"', 'scalar = "a", statistic = "kl_k3"', "when[0]: needs either statistic"),
    ('scalar = "mine"', 'statistic = "ess_fracton"', "when[0].statistic: no statistic 'ess_fracton' (did you mean"),
    ('scalar = "mine"', 'statistic = "abs_log_ratio_p999"', "(did you mean 'abs_log_ratio_p99"),
    ('scalar = "mine"', 'statistic = "kl_k3"', "slices: kl_k3 is of a slice: slices = ['*'] takes all"),
    ("when = [", 'slices = ["*"]\nwhen = [', "slices: has no effect"),
    ("above = 1", "above = 1, slice = 'text'", "when[0].slice: a scalar has no slices"),
    ("above = 1", "above = 1, measure = 'slope'", "when[0].window: measure = 'slope' needs a window"),
    ("above = 1", "above = 1, take = 'median'", "when[0].window: take = 'median' needs a window"),
    ("above = 1", "above = 1, window = 10", "when[0].window: has no effect here"),
    ("above = 1", "above = 1, window = 10, measure = 'slope', take = 'max'", "when[0].take: measure = 'slope' already"),
    ("above = 1", "above = 1, divided_by_scalar = 'a', minus_scalar = 'b'", "when[0]: takes at most one of"),
    ("above = 1", "above = 1, measure = 'robust_z', minus_scalar = 'b'", "when[0].measure: robust_z is of one signal"),
    ("when = [{", "for_steps = 0\nwhen = [{", "for_steps: Input should be greater than or equal to 1, got 0"),
    ("when = [{", "for_steps = true\nwhen = [{", "for_steps: Input should be a valid integer, got True"),
    ("when = [{", "for_steps = 5000\nwhen = [{", "for_steps: 5000 with a window of 1 looks back 5000"),
    ('scalar = "mine"', 'slice = "a", statistic = "n_nonfinite", measure = "robust_z"', "when[0].measure: robust_z"),
    ("when = [{", "for_step = 3\nwhen = [{", "for_step: no such field (did you mean 'for_steps'?)"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "complaint"), BAD)
def test_a_bad_rule_is_an_error_with_file_rule_and_field(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(RuleError) as caught:
        load_rules(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: rule ")
    assert complaint in text
    if "My Rule" not in new:
        assert "rule 'mine': " in text


def test_all_complaints_come_at_once(tmp_path: Path) -> None:
    one = write(tmp_path, GOOD.replace("above", "abov") + GOOD.replace('"reward"', '"x"'), "one.toml")
    two = write(tmp_path, "rules = 3", "two.toml")
    three = write(tmp_path, 'disable = ["entropy-flor"]' + GOOD + GOOD, "three.toml")
    with pytest.raises(RuleError) as caught:
        load_rules(one, two)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{one}: rule 'mine': when[0].abov: ")
    assert lines[1].startswith(f"{one}: rule 'mine': link: ")
    assert lines[2].startswith(f"{two}: rules: ")
    assert len(lines) == 3
    with pytest.raises(
        RuleError, match=r"disable: no earlier rule is 'entropy-flor' \(did you mean 'entropy-floor'\?\)"
    ):
        load_rules(three)
    with pytest.raises(RuleError, match="rule 'mine': name: there are 2 of this name"):
        load_rules(three)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.toml", "[[rules]\n", "not TOML: .*line 1"),
        ("a.toml", "version = 2", "version: Input should be 1, got 2"),
        ("a.yaml", "- 1", "a file of rules is a table with rules, got list"),
        ("a.yaml", "a: [", "not YAML"),
        ("a.json", "{}", "rules are .toml, .yaml or .yml files"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    with pytest.raises(RuleError, match=complaint):
        load_rules(write(tmp_path, text, name))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r"none\.toml: cannot be read: No such file"):
        load_rules(tmp_path / "none.toml")


def test_names() -> None:
    assert quantile_level("abs_log_ratio_p99_9") == (True, 0.999)
    assert quantile_level("log_ratio_p1") == (False, 0.01)
    assert quantile_level("log_ratio_p101") is None
    assert is_statistic("kl_k3")
    assert is_statistic("nonfinite_fraction")
    assert not is_statistic("entropy")
    assert split_key("rl/post_tool/ess_fraction") == ("post_tool", "ess_fraction")
    assert split_key("actor/entropy") is None
    assert split_key("ess_fraction") is None
    assert [as_number(value) for value in (1, 2.5, "Infinity", True, [1], "x", np.float32(0.5))] == [
        1.0, 2.5, math.inf, None, None, None, 0.5,
    ]  # fmt: skip
    assert math.isnan(as_number(None) or 0.0)
    assert as_number(10**400) == math.inf


def test_scalars_are_found_under_the_names_of_trainers() -> None:
    aliases = builtin_rules().aliases()
    verl = {"actor/entropy": 0.3, "critic/score/mean": 1.0, "val-core/gsm8k/acc/mean@8": 0.5, "actor/grad_norm": 0.1}
    assert [aliases.find(name, verl) for name in ("entropy", "reward", "evaluation", "grad_norm", "kl")] == [
        "actor/entropy", "critic/score/mean", "val-core/gsm8k/acc/mean@8", "actor/grad_norm", None,
    ]  # fmt: skip
    trl = {"clip_ratio/region_mean": 0.1, "train/completions/mean_length": 9.0, "frac_reward_zero_std": 0.2}
    aliases = builtin_rules().aliases()
    assert [aliases.find(name, trl) for name in ("clip_ratio", "length", "zero_std_groups")] == list(trl)
    openrlhf = {"ppo_clip_ratio": 0.1, "actor_grad_norm": 1.0, "response_length": 5.0, "ppo_kl": 0.1, "vllm_kl": 0.2}
    aliases = builtin_rules().aliases()
    found = [aliases.find(name, openrlhf) for name in ("clip_ratio", "grad_norm", "length", "approx_kl", "engine_kl")]
    assert found == list(openrlhf)


def test_an_own_name_comes_before_an_alias() -> None:
    assert Aliases({"a": ["b"]}).find("a", {"b": 1.0, "a": 2.0}) == "a"


STEPS = np.arange(1, 101)


def measure(values: Any, baseline: float | None = None, spread: float | None = None, **fields: Any) -> Floats:
    condition = Condition.model_validate({"scalar": "x", "above": 0, **fields})
    array = np.asarray(values, np.float64)
    return measured(condition, array, STEPS[: len(array)], baseline, spread)


def test_measures_have_their_values() -> None:
    line = 3.0 + 0.5 * STEPS
    growth = 0.1 * np.exp(0.02 * STEPS)
    assert measure(line).tolist() == line.tolist()
    assert measure([2.0, 4.0], 2.0, measure="ratio").tolist() == [1.0, 2.0]
    assert measure([2.0, 4.0], 3.0, measure="difference").tolist() == [-1.0, 1.0]
    assert measure([2.0, 4.0], 3.0, 0.5, measure="robust_z").tolist() == [-2.0, 2.0]
    assert np.isnan(measure([2.0, 4.0], None, measure="ratio")).all()
    assert measure([1.0, -1.0, 0.0], 0.0, measure="ratio").tolist()[:2] == [math.inf, -math.inf]
    slope = measure(line, measure="slope", window=20)
    assert np.isnan(slope[:19]).all()
    assert slope[19:] == pytest.approx(0.5)
    assert measure(growth, measure="growth", window=21)[30] == pytest.approx(0.02)
    assert measure(growth, measure="doubling_steps", window=20)[30] == pytest.approx(math.log(2) / 0.02)
    assert measure(-line, measure="doubling_steps", window=20)[30:40].tolist() != [0.0]
    assert measure(line[::-1], measure="doubling_steps", window=20)[30] == math.inf
    assert measure(line, measure="trend", window=10)[-1] == 1.0
    assert measure(line[::-1], measure="trend", window=10)[-1] == -1.0
    assert measure([1.0] * 5 + [2.0] * 5, measure="change", window=10)[-1] == 1.0
    assert measure([1.0, math.nan, math.inf, 0.0], measure="nonfinite").tolist() == [0.0, 1.0, 1.0, 0.0]


def test_a_slope_does_not_care_for_outliers_and_uneven_steps() -> None:
    rng = np.random.default_rng(5)
    steps = np.cumsum(rng.integers(1, 20, 100))
    values = 2.0 * steps
    values[rng.choice(100, 20, replace=False)] = 1e9
    condition = Condition(scalar="x", measure="slope", window=100, above=0)
    assert measured(condition, values.astype(float), steps, None)[-1] == pytest.approx(2.0, rel=0.5)


def test_takes_are_those_of_numpy() -> None:
    rng = np.random.default_rng(6)
    values = rng.standard_normal(100)
    for window in (4, 7, 20):
        windows = np.lib.stride_tricks.sliding_window_view(values, window)
        for take, expected in {
            "mean": windows.mean(1),
            "median": np.median(windows, 1),
            "min": windows.min(1),
            "max": windows.max(1),
            "std": windows.std(1),
            "p95": np.quantile(windows, 0.95, axis=1, method="inverted_cdf"),
        }.items():
            found = measure(values, take=take, window=window)
            assert np.isnan(found[: window - 1]).all()
            assert found[window - 1 :] == pytest.approx(expected)


class Recorded:
    """A history as a monitor keeps it: of the last ``memory`` steps, with the medians of the first ``warmup``."""

    def __init__(self, warmup: int, memory: int = 10_000) -> None:
        self._warmup, self._memory = warmup, memory
        self._steps: list[int] = []
        self._signals: dict[str, list[float]] = {}
        self._frozen: dict[str, Floats] | None = None

    def add(self, step: int, signals: dict[str, float]) -> None:
        self._steps.append(step)
        for key in {*signals, *self._signals}:
            column = self._signals.setdefault(key, [math.nan] * (len(self._steps) - 1))
            column.append(signals.get(key, math.nan))
        if len(self._steps) == self._warmup:
            self._frozen = {key: np.array(values) for key, values in self._signals.items()}

    def last(self, signal: str, n: int) -> Floats:
        return np.array(self._signals.get(signal, [])[-min(n, self._memory) :])

    def steps(self, n: int) -> NDArray[np.int64]:
        return np.array(self._steps[-min(n, self._memory) :])

    def _finite(self, signal: str) -> Floats | None:
        values = None if self._frozen is None else self._frozen.get(signal)
        values = None if values is None else values[np.isfinite(values)]
        return values if values is not None and len(values) else None

    def baseline(self, signal: str) -> float | None:
        values = self._finite(signal)
        return None if values is None else float(np.median(values))

    def spread(self, signal: str) -> float | None:
        values = self._finite(signal)
        return None if values is None else robust_spread(values)


def step_by_step(rules: RuleSet, table: Table, warmup: int = 20, memory: int = 10_000) -> tuple[list[Alert], RuleBook]:
    """The alerts with which episodes begin, asked as a monitor asks."""
    book, history = RuleBook(rules), Recorded(warmup, memory)
    told: list[Alert] = []
    episodes = Episodes()
    for i, step in enumerate(table.steps.tolist()):
        signals = {}
        for key, column in table.signals.items():
            present = table.present[key][i] if key in table.present else column[i] == column[i]
            if present:
                signals[key] = float(column[i])
        history.add(step, signals)
        alerts = book.evaluate(step, signals, history)
        told += episodes.tell([Finding(alert.key, alert, book.cool_down(alert)) for alert in alerts], i + 1, step)
    return told, book


def test_step_by_step_and_at_once_agree(tmp_path: Path) -> None:
    text = """
[constants]
limit = 0.5
"""
    for i, (when, fields) in enumerate(
        [
            ('{ scalar = "a", above = 1.2 }', "for_steps = 2\ncool_down = 5"),
            ('{ scalar = "a", take = "median", window = 5, measure = "ratio", above = 1.1 }', "cool_down = 3"),
            ('{ scalar = "rare", measure = "trend", window = 6, above = 0.3 }', "for_steps = 2\ncool_down = 30"),
            (
                '{ scalar = "a", measure = "slope", window = 8, above = 0 }, { scalar = "rare", above = 1 }',
                "for_steps = 2",
            ),
            ('{ statistic = "kl_k3", above = 1.1 }', 'slices = ["p*"]\nmin_tokens = 900\ncool_down = 4'),
            ('{ statistic = "kl_k3", divided_by_slice = "text", measure = "ratio", above = 1.3 }', 'slices = ["*"]'),
            ('{ statistic = "nonfinite_fraction", above = 0.01 }', 'slices = ["*"]\nafter_step = 40'),
            ('{ scalar = "bad", measure = "nonfinite", above = 0 }', "for_steps = 2\ncool_down = 2"),
            ('{ scalar = "a", minus_scalar = "limit", above = 0.7 }', "for_steps = 2"),
            ('{ scalar = "a", measure = "robust_z", above = 2 }', "for_steps = 1"),
            ('{ scalar = "a", measure = "difference", below = -0.3 }', "for_steps = 1"),
        ]
    ):
        text += (
            f'[[rules]]\nname = "r{i}"\ntitle = "t"\nlevel = "warning"\nlink = "reward"\nwhen = [{when}]\n{fields}\n'
        )
    rules = load_rules(write(tmp_path, text), builtin=False)
    rng = np.random.default_rng(7)
    n = 300
    signals = {key: 1.0 + 0.2 * rng.standard_normal(n) for key in ("a", "text/kl_k3", "post/kl_k3", "pre/kl_k3")}
    signals["rare"] = np.where(np.arange(n) % 7 == 3, 1.0 + rng.standard_normal(n), np.nan)
    signals["bad"] = np.where(rng.random(n) < 0.5, np.nan, 1.0)
    for name in ("text", "post", "pre"):
        signals[f"{name}/n_tokens"] = rng.integers(800, 1200, n).astype(float)
        signals[f"{name}/n_finite"] = signals[f"{name}/n_tokens"] - (rng.random(n) < 0.1) * rng.integers(0, 30, n)
    table = Table(np.cumsum(rng.integers(1, 3, n)), signals, {"bad": rng.random(n) < 0.7})
    at_once = replay(rules, table, 20)
    one_by_one, _ = step_by_step(rules, table)
    assert {alert.name for alert in at_once.alerts} == {rule.name for rule in rules.rules}

    def key(alert: Alert) -> tuple[int, str, str]:
        return alert.step, alert.name, alert.signal

    assert sorted(map(key, one_by_one)) == sorted(map(key, at_once.alerts))
    by_key = {key(alert): alert for alert in at_once.alerts}
    for alert in one_by_one:
        assert str(alert) == str(by_key[key(alert)])  # NaN is not equal to itself


def test_a_rule_waits_for_its_rarest_signal(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, '{ scalar = "rare", above = 1 }', for_steps=3, cool_down=200)
    rare = np.where(STEPS % 10 == 0, 2.0, np.nan)
    found = replay(rules, Table(STEPS, {"rare": rare}), 10).alerts
    assert [alert.step for alert in found] == [30]
    one_by_one, _ = step_by_step(rules, Table(STEPS, {"rare": rare}), memory=50)
    assert [alert.step for alert in one_by_one] == [30]


LIVE = """
[[rules]]
name = "z"
title = "t"
level = "warning"
link = "reward"
when = [{ scalar = "x", measure = "robust_z", above = 4 }]
for_steps = 3

[[rules]]
name = "z-of-a-slice"
title = "t"
level = "warning"
link = "reward"
slices = ["*"]
when = [{ statistic = "kl_k3", take = "median", window = 5, measure = "robust_z", above = 4 }]

[[rules]]
name = "again"
title = "t"
level = "warning"
link = "reward"
when = [{ scalar = "again", above = 0.5 }]
cool_down = 45

[[rules]]
name = "never-over"
title = "t"
level = "warning"
link = "reward"
when = [{ scalar = "again", above = 0.5 }]
cool_down = 46

[[rules]]
name = "long"
title = "t"
level = "warning"
link = "reward"
when = [{ scalar = "x", take = "median", window = 900, measure = "ratio", above = 1.5 }]
for_steps = 20

[[rules]]
name = "rare"
title = "t"
level = "warning"
link = "evaluation"
when = [{ scalar = "evaluation", take = "min", window = 12, measure = "ratio", above = 1.5 }]
"""


@pytest.mark.parametrize("with_statistics", [False, True])
def test_a_monitor_and_a_replay_of_what_it_recorded_agree(tmp_path: Path, with_statistics: bool) -> None:
    rules = load_rules(write(tmp_path, LIVE), builtin=False)
    rng = np.random.default_rng(8)
    folder = tmp_path / "run"
    told: list[Alert] = []
    monitor = Monitor(folder, RuleBook(rules), baseline=50)
    for step in range(1, 1401):
        grown = 2.0 if step > 300 else 1.0
        scalars = {"x": grown + 0.1 * rng.standard_normal(), "again": float(step % 50 < 5 and 400 < step < 800)}
        if step % 90 == 0 or step == 20:
            scalars["evaluation"] = grown
        stats = None
        if with_statistics:
            logp = (0.01 * grown * rng.standard_normal(300)).astype(np.float32)
            stats = slice_stats(logp, np.zeros_like(logp), {"text": np.arange(300) < 200})
        told += monitor.observe(step, stats, scalars)
        if step == 710:  # what is needed is remembered
            monitor.close()
            monitor = Monitor(folder, RuleBook(rules), baseline=50)
    monitor.close()
    assert not monitor.lost
    replayed = ask_rules(open_run(folder), rules, 50).alerts
    counts = {"z": 1, "long": 1, "rare": 1, "again": 8, "never-over": 1} | (
        {"z-of-a-slice": 1} if with_statistics else {}
    )
    assert Counter(alert.name for alert in replayed) == counts
    of_rules = [alert for alert in told if alert.name in counts]
    assert sorted(map(str, of_rules)) == sorted(map(str, replayed))


def test_rings_remember_rare_signals_as_long_and_survive_another_depth() -> None:
    rings, history = Rings(600), Recorded(10**9)
    rng = np.random.default_rng(9)
    for step in range(1500):
        signals = {"every": float(step)}
        if rng.random() < 0.1:
            signals["rare"] = rng.standard_normal()
        if step > 700:
            signals["late"] = math.nan if step % 2 else 1.0
        rings.push(2 * step, signals)
        history.add(2 * step, signals)
    other, smaller = Rings(600), Rings(512)
    for each in (other, smaller):
        each.restore(*rings.save())
    for n in (1, 7, 512, 600, 1500, LONGEST):
        for each in (rings, other):
            assert each.steps(n).tolist() == history.steps(n).tolist()
            for name in ("every", "rare", "late"):
                found, wanted = each.last(name, n), history.last(name, n)
                if name == "every":
                    wanted = np.where(np.arange(len(wanted))[::-1] < 600, wanted, math.nan)
                assert np.array_equal(found, wanted, equal_nan=True)
    assert np.array_equal(smaller.last("every", 512), history.last("every", 512))
    assert np.isnan(smaller.last("every", 513)[0])
    for each in (rings, other, smaller):
        each.push(3000, {"every": -1.0, "rare": 5.0})
        assert each.last("every", 3).tolist() == [1498.0, 1499.0, -1.0]
        assert each.last("rare", 1).tolist() == [5.0]
    assert rings.last("never", 5).size == 0
    assert rings.last("late", 1).tolist() != [1.0]


def test_an_episode_is_told_once_and_again_after_the_cool_down(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, '{ scalar = "x", above = 1 }', cool_down=10)
    values = np.zeros(100)
    values[[10, 15, 24, 40, 41, 42]] = 2.0  # steps 11, 16, 25; 41, 42, 43
    table = Table(STEPS, {"x": values})
    assert [alert.step for alert in replay(rules, table, 10).alerts] == [11, 41]
    assert [alert.step for alert in step_by_step(rules, table)[0]] == [11, 41]


def test_what_is_missing_is_counted_and_said_once(tmp_path: Path) -> None:
    text = GOOD + GOOD.replace('name = "mine"', 'name = "other"').replace('scalar = "mine"', 'scalar = "entropi"')
    text += GOOD.replace('name = "mine"', 'name = "s"').replace('scalar = "mine"', 'statistic = "ess"')
    text += 'slices = ["tool_*"]'
    rules = load_rules(write(tmp_path, text), builtin=False)
    table = Table(STEPS, {"mine": np.zeros(100), "entropy": np.zeros(100), "text/ess": np.ones(100)})
    _, book = step_by_step(rules, table)
    expected = "2 of 3 rules have nothing to look at (other, s): this run has no entropi (did you mean 'entropy'?), ess"
    assert book.notices() == []  # not sure yet
    assert book.notices(at_end=True) == [expected]
    assert book.notices(at_end=True) == []
    assert replay(rules, table, 10).notices == [expected]
    assert {rule: dict(counts) for rule, counts in book.missing.items()} == {
        "other": {"entropi": 100},
        "s": {"tool_*/ess": 100},
    }
    young = RuleBook(rules)
    young.evaluate(1, {"mine": 0.0}, Recorded(5))
    assert young.notices() == []  # not sure yet
    assert len(young.notices(at_end=True)) == 1


def test_slices_with_too_few_tokens_at_every_step_are_named(tmp_path: Path) -> None:
    text = GOOD.replace('scalar = "mine"', 'statistic = "ess"') + 'slices = ["*"]\nmin_tokens = 1000\n'
    rules = load_rules(write(tmp_path, text), builtin=False)
    few, once = np.full(100, 999.0), np.full(100, 999.0)
    once[50] = 1000.0
    signals = {"a/n_finite": few, "b/n_finite": once, "c/n_finite": few, "d/n_finite": np.full(100, np.nan)}
    signals |= {f"{name}/ess": np.ones(100) for name in "abcd"}
    table = Table(STEPS, signals)
    expected = [
        "slices with fewer than 1,000 tokens at every step, at which some rules never look: 2 (a, c; the rules: mine)"
    ]
    assert replay(rules, table, 10).notices == expected
    _, book = step_by_step(rules, table)
    assert book.notices(at_end=True) == expected
    assert book.notices(at_end=True) == []


def test_a_monitor_with_rules_says_what_is_missing_once_and_alarms(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(
        tmp_path, GOOD + GOOD.replace('name = "mine"', 'name = "other"').replace('scalar = "mine"', 'scalar = "x"')
    )
    with caplog.at_level("INFO", "pyrlstats.monitor"), Monitor(tmp_path / "run", RuleBook.load(path)) as monitor:
        for step in range(1, 401):
            monitor.observe(step, None, {"mine": 2.0 if step > 300 else 0.0})
    (alert,) = monitor.alerts
    assert (alert.step, alert.name, alert.level, alert.signal) == (301, "mine", "warning", "mine")
    notices = [record for record in caplog.records if "nothing to look at" in record.message]
    assert [(record.levelname, record.message.count("other")) for record in notices] == [("WARNING", 1)]
    assert monitor.lost == {}
    assert [each.to_json() for each in RunReader(tmp_path / "run").alerts] == [alert.to_json()]


def test_nan_says_nothing_and_a_signal_that_is_seldom_logged_is_not_nan(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, '{ scalar = "loss", measure = "nonfinite", above = 0 }', for_steps=2)
    seldom = np.where(STEPS % 10 == 0, 0.1, np.nan)
    assert replay(rules, Table(STEPS, {"loss": seldom}), 10).alerts == []
    assert step_by_step(rules, Table(STEPS, {"loss": seldom}))[0] == []
    table = Table(STEPS, {"loss": np.full(100, np.nan)}, {"loss": STEPS % 10 == 0})
    assert [alert.step for alert in replay(rules, table, 10).alerts] == [20]
    assert [alert.step for alert in step_by_step(rules, table)[0]] == [20]
    high = rules_of(tmp_path, '{ scalar = "loss", above = 1 }', for_steps=2)
    assert replay(high, table, 10).alerts == []
    infinite = Table(STEPS, {"loss": np.full(100, np.inf)})
    assert replay(high, infinite, 10).alerts[0].step == 2


def test_what_is_forgotten_is_not_taken_for_nan(tmp_path: Path) -> None:
    when = '{ scalar = "loss", measure = "nonfinite", above = 0 }, { scalar = "rare", above = 0 }'
    rules = rules_of(tmp_path, when, for_steps=10)
    with Monitor(None, RuleBook(rules)) as monitor:
        for step in range(1, 1651):  # not finite at the last 9 steps at which both came
            rare = {"rare": 1.0} if step % 100 == 0 else {}
            scalars = {"loss": math.nan if rare and step >= 800 else 0.1, **rare}
            monitor.observe(step, None, scalars)
        assert [alert for alert in monitor.alerts if alert.name == "r"] == []


def test_training_that_goes_back_is_judged_anew(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, '{ scalar = "x", above = 1 }', cool_down=50)
    book, history = RuleBook(rules), Recorded(5)
    for step in range(1, 31):
        history.add(step, {"x": 2.0 if step >= 30 else 0.0})
        alerts = book.evaluate(step, {"x": 0.0}, history)
    assert [alert.step for alert in alerts] == [30]
    again = Recorded(5)
    for step in range(1, 21):
        again.add(step, {"x": 0.0})
    assert book.evaluate(20, {"x": 0.0}, again) == []


def test_no_steps_and_one_step() -> None:
    rules = builtin_rules()
    assert replay(rules, Table(np.zeros(0, np.int64), {}), 10).alerts == []
    one = Table(np.array([7]), {"loss": np.array([np.inf]), "text/kl_k3": np.array([np.nan])})
    assert replay(rules, one, 10).alerts == []


def test_a_message_says_where_what_and_how_much(tmp_path: Path) -> None:
    rules = builtin_rules()
    n = 200
    column = np.where(np.arange(n) < 100, 0.25, 1.0)
    flat = {f"{name}/abs_log_ratio_p99_9": np.full(n, 0.25) for name in ("text", "pre_tool")}
    found = replay(rules, Table(np.arange(n), {**flat, "post_tool/abs_log_ratio_p99_9": column}), 50).alerts
    assert {alert.name for alert in found} == {"one-slice-leaves-the-text", "tail-far-from-baseline", "tail-growing"}
    far = next(alert for alert in found if alert.name == "tail-far-from-baseline")
    tail = "median of the last 20 post_tool/abs_log_ratio_p99_9 is"
    assert far.message == (
        f"post_tool: the tail of the log-ratio is far above its baseline: {tail} 4 times its baseline 0.25 (above 3); "
        f"{tail} +3e+03 robust deviations from its baseline 0.25 (above 6), 5 times in a row"
    )
    assert far.signal == "post_tool/abs_log_ratio_p99_9"
    assert Alert.from_json(far.to_json()).key == far.key
