"""bench/compare.py on made-up runs: what it calls a regression, and what it refuses to compare."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rich", reason="rich is not installed")

from bench import compare

POINTS = 200
ROUNDS = 20
NOISE = 0.02


def shares(seed, *, points=POINTS, rounds=ROUNDS, noise=NOISE, between=0.0, factors=None) -> dict[str, list[float]]:
    """By point; rounds vary by `noise`, runs by `between`; factors: {index: what the point's shares are multiplied by}."""
    rng = np.random.default_rng(seed)
    middle = np.linspace(0.05, 1.0, points) * np.exp(between * rng.standard_normal(points))
    rows = middle[:, None] * np.exp(noise * rng.standard_normal((points, rounds)))
    return {f"bench/test_x.py::test[{i}]": [*(rows[i] * (factors or {}).get(i, 1.0))] for i in range(points)}


def save(path, points, limits=None, **conditions) -> str:
    """limits: {index: what is recorded beside the point's shares}."""
    described = {"cpu": "a CPU", "threads": 2, **conditions}
    benchmarks = [
        {"fullname": name, "extra_info": {"suite": "layer", "shares": rows, **described, **(limits or {}).get(i, {})}}
        for i, (name, rows) in enumerate(points.items())
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"benchmarks": benchmarks}))
    return str(path)


@pytest.fixture
def runs(tmp_path):
    """Compares two made-up runs: (exit status, indices that regressed, indices that improved)."""

    def run(old, new, old_limits=None, new_limits=None):
        files = save(tmp_path / "new.json", new, new_limits), save(tmp_path / "old.json", old, old_limits)
        saved = compare.read(Path(files[1])), compare.read(Path(files[0]))
        found = compare.changes(*saved, compare.common_points(*saved)[0])
        index = {name: i for i, name in enumerate(old)}
        status = compare.main([*files])
        return status, [index[c.point] for c in found if c.regressed], [index[c.point] for c in found if c.improved]

    return run


def test_a_regression_beyond_the_noise(runs, capsys):
    assert runs(shares(1), shares(2, factors={7: 0.8, 150: 0.9})) == (1, [7, 150], [])
    out = capsys.readouterr().out
    assert "2 regressed" in out
    (line,) = (line for line in out.splitlines() if "test[7]" in line)
    assert re.search(r" -(19|20)\.\d% ", line)


def test_an_improvement_is_no_regression(runs, capsys):
    assert runs(shares(1), shares(2, factors={3: 1.25})) == (0, [], [3])
    assert "1 improved" in capsys.readouterr().out


@pytest.mark.parametrize("between", [0.0, 0.03])
def test_noise_is_no_regression(runs, between):
    """Pairs of runs in which nothing changed, also where runs differ by more than their rounds do. One in 100 may regress."""
    pairs = [runs(shares(seed, between=between), shares(100 + seed, between=between)) for seed in range(20)]
    assert sum(status for status, *_ in pairs) <= 2
    assert sum(bool(improved) for *_, improved in pairs) <= 2


def test_what_rounds_show_decides(runs):
    """The same 15 % is a regression where rounds agree, and not where they do not."""
    quiet, noisy = 0.02, 0.3
    assert runs(shares(1, noise=quiet), shares(2, noise=quiet, factors={9: 0.85}))[:2] == (1, [9])
    assert runs(shares(1, noise=noisy), shares(2, noise=noisy, factors={9: 0.85}))[:2] == (0, [])


def test_one_noisy_point_is_judged_by_its_own_rounds(runs):
    old, new = shares(1), shares(2)
    name = list(old)[50]
    rng = np.random.default_rng(3)
    old[name] = [*(0.5 * np.exp(0.4 * rng.standard_normal(ROUNDS)))]
    new[name] = [*(0.4 * np.exp(0.4 * rng.standard_normal(ROUNDS)))]
    assert runs(old, new)[:2] == (0, [])


def test_few_rounds_that_agree_by_chance(runs):
    """Three rounds with next to no spread: the spread of the other points counts."""
    old, new = shares(1), shares(2)
    name = list(old)[50]
    old[name], new[name] = [0.5, 0.5, 0.5001], [0.48, 0.48, 0.4801]
    assert runs(old, new)[:2] == (0, [])


def test_all_points_slower_alike(runs):
    """That is no noise: most points regressed."""
    status, regressed, _ = runs(shares(1), shares(2, factors=dict.fromkeys(range(POINTS), 0.85)))
    assert status == 1
    assert len(regressed) > 0.9 * POINTS


def test_a_change_below_the_floor_is_not_reported(runs):
    assert runs(shares(1, noise=1e-4), shares(2, noise=1e-4, factors={4: 0.98})) == (0, [], [])


def test_a_point_on_another_machine_state_is_not_judged(runs, capsys):
    """Whichever limit it is and whichever way it moved; 25 % is where it begins, and points without limits are judged."""
    slower = dict.fromkeys((3, 4, 5, 6), 0.5)
    before = {key: {"limit_read_gb_s": 30.0, "limit_gflop_s": 400.0} for key in (3, 4, 5)}
    after = {
        3: {"limit_read_gb_s": 23.9, "limit_gflop_s": 400.0},
        4: {"limit_read_gb_s": 30.0, "limit_gflop_s": 501.0},
        5: {"limit_read_gb_s": 37.4, "limit_gflop_s": 321.0},
    }
    assert runs(shares(1), shares(2, factors=slower), before, after) == (1, [5, 6], [])
    out = capsys.readouterr().out
    assert "2 measured on another machine state, not judged" in out
    assert re.search(r"test\[3\] +30\.0 +23\.9 +-20\.3% +GB/s", out)
    assert re.search(r"test\[4\] +400\.0 +501\.0 +\+25\.2% +GFLOP/s", out)
    assert f"{POINTS - 2} points, 2 regressed, 0 improved, 2 more not judged;" in out


def test_no_point_left_to_judge(tmp_path, capsys):
    half = save(tmp_path / "half.json", shares(1), {key: {"limit_gflop_s": 200.0} for key in range(POINTS)})
    whole = save(tmp_path / "whole.json", shares(2), {key: {"limit_gflop_s": 400.0} for key in range(POINTS)})
    assert f"at all {POINTS} points a limit differs by more than a factor of 1.25, by -50% at" in refused(capsys, half, whole)


def test_names_in_tables_are_as_they_are(tmp_path, capsys):
    """rich would take [hot] for a style."""
    files = [
        save(tmp_path / f"{i}.json", {"test_wake_up[hot]": [share] * 5, "test_wake_up[cold]": [0.5] * 5})
        for i, share in enumerate((0.2, 0.4))
    ]
    assert compare.main(files) == 1
    assert re.search(r"test_wake_up\[hot\] +40\.0% +20\.0% +-50\.0%", capsys.readouterr().out)


def test_points_that_only_one_run_has(tmp_path, capsys):
    old, new = shares(1), shares(2)
    del new["bench/test_x.py::test[0]"], old["bench/test_x.py::test[1]"]
    files = save(tmp_path / "new.json", new), save(tmp_path / "old.json", old)
    assert compare.main([*files]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[out.index(f"only in {files[1]}:") + 1].strip() == "bench/test_x.py::test[0]"
    assert out[out.index(f"only in {files[0]}:") + 1].strip() == "bench/test_x.py::test[1]"


@pytest.mark.parametrize(
    ("tail", "freedom", "quantile"),
    # of printed tables
    [(0.05, 1, 6.314), (0.01, 4, 3.747), (0.001, 10, 4.144), (0.0005, 30, 3.646), (0.005, 120, 2.617)],
)
def test_students_distribution(tail, freedom, quantile):
    assert compare.student(tail, freedom) == pytest.approx(quantile, abs=6e-4)


# Refusals


def refused(capsys, *arguments) -> str:
    assert compare.main([*arguments]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


@pytest.mark.parametrize(("key", "value"), [("cpu", "another CPU"), ("threads", 4)])
def test_other_conditions(tmp_path, capsys, key, value):
    old, new = save(tmp_path / "old.json", shares(1)), save(tmp_path / "new.json", shares(2), **{key: value})
    message = refused(capsys, new, old)
    assert f"measured with {key} {value}" in message
    assert old in message


def test_no_point_in_common(tmp_path, capsys):
    old = save(tmp_path / "old.json", {"a": [0.5]})
    new = save(tmp_path / "new.json", {"b": [0.5]})
    assert "no point in common" in refused(capsys, new, old)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"benchmarks": []}',
        '{"benchmarks": [{"fullname": "a", "extra_info": {}}]}',
        '{"benchmarks": [{"fullname": "a", "extra_info": {"shares": []}}]}',
        '{"benchmarks": [{"fullname": "a", "extra_info": {"shares": [0.5]}}]}',
        '{"benchmarks": [{"fullname": "a", "extra_info": {"shares": [0.0], "cpu": "a CPU", "threads": 2}}]}',
        '{"benchmarks": [{"fullname": "a", "extra_info": {"shares": [0.5], "cpu": "a", "threads": 2, "limit_gflop_s": 0}}]}',
        '{"benchmarks": [{"fullname": "a", "extra_info": {"shares": [0.5], "cpu": "a", "threads": 2, "limit_gflop_s": null}}]}',
        '{"benchmarks": [{"fullname": "a", "extra_info": {"shares": ["fast"], "cpu": "a CPU", "threads": 2}}]}',
    ],
)
def test_a_file_that_is_no_run(tmp_path, capsys, content):
    good, bad = save(tmp_path / "good.json", shares(1)), tmp_path / "bad.json"
    bad.write_text(content)
    assert f"{bad}: expected" in refused(capsys, good, str(bad))


def test_a_missing_file(tmp_path, capsys):
    good, gone = save(tmp_path / "good.json", shares(1)), tmp_path / "gone.json"
    assert f"{gone}: No such file" in refused(capsys, str(gone), good)
    assert f"{gone}: No such file" in refused(capsys, good, str(gone))


# Which runs


@pytest.fixture
def storage(tmp_path, monkeypatch):
    """Three saved runs; the last is the slowest."""
    monkeypatch.chdir(tmp_path)
    for number in (1, 2, 3):
        path = tmp_path / ".benchmarks" / "Linux" / f"{number:04}_commit.json"
        save(path, shares(number, factors={0: 0.5} if number == 3 else None))
        os.utime(path, (number, number))


@pytest.mark.parametrize(
    ("arguments", "status", "compared"),
    [
        ([], 1, "0003_commit.json against .benchmarks/Linux/0002_commit.json"),
        (["2"], 0, "0002_commit.json against .benchmarks/Linux/0001_commit.json"),
        (["3", "1"], 1, "0003_commit.json against .benchmarks/Linux/0001_commit.json"),
        ([".benchmarks/Linux/0001_commit.json", "0003"], 0, "0001_commit.json against .benchmarks/Linux/0003_commit.json"),
    ],
)
def test_the_last_run_and_the_one_before(storage, capsys, arguments, status, compared):
    assert compare.main(arguments) == status
    assert compared in capsys.readouterr().out


def test_too_few_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "found 0; make bench saves one" in refused(capsys)
    save(tmp_path / ".benchmarks" / "Linux" / "0001_commit.json", shares(1))
    assert "found 1; make bench saves one" in refused(capsys)
    assert "no saved run has the number 7" in refused(capsys, "7")
    assert "found 3 runs" in refused(capsys, "1", "2", "3")
