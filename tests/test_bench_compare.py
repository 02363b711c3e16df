"""bench/compare.py on made-up runs: what it calls a regression, and what it refuses to compare."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from bench import compare

POINTS = 60
ROUNDS = 20
NOISE = 0.02


def shares(seed, *, points=POINTS, rounds=ROUNDS, noise=NOISE, between=0.0, factors=None) -> dict[str, list[float]]:
    """Shares by point; rounds vary by `noise`, runs by `between`; factors: {index: what multiplies the point's shares}."""
    rng = np.random.default_rng(seed)
    middle = np.linspace(0.05, 1.0, points) * np.exp(between * rng.standard_normal(points))
    rows = middle[:, None] * np.exp(noise * rng.standard_normal((points, rounds)))
    return {f"bench/test_x.py::test[{i}]": [*(rows[i] * (factors or {}).get(i, 1.0))] for i in range(points)}


def save(path, points, also=None, **conditions) -> str:
    """also: {index: what is recorded beside the point's shares}."""
    described = {"cpu": "a CPU", "threads": 2, **conditions}
    benchmarks = [
        {"fullname": name, "extra_info": {"suite": "layer", "shares": rows, **described, **(also or {}).get(i, {})}}
        for i, (name, rows) in enumerate(points.items())
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"benchmarks": benchmarks}))
    return str(path)


@pytest.fixture
def runs(tmp_path, capsys):
    """Compares two made-up runs: (exit status, indices that are slower, that are faster, that are not judged)."""

    def run(old, new, old_also=None, new_also=None):
        files = save(tmp_path / "new.json", new, new_also), save(tmp_path / "old.json", old, old_also)
        found = compare.compare(compare.read(Path(files[1])), compare.read(Path(files[0])))
        index = {name: i for i, name in enumerate(old)}
        status = compare.main([*files])
        return status, *(
            sorted(index[c.point] for c in found if c.verdict == verdict) for verdict in ("slower", "faster", "not judged")
        )

    return run


def test_a_slower_point(runs, capsys):
    assert runs(shares(1), shares(2, factors={7: 0.8, 40: 0.9})) == (1, [7, 40], [], [])
    out = capsys.readouterr().out
    assert f"{POINTS} points, 2 slower, 0 faster, 0 not judged" in out
    (line,) = (line for line in out.splitlines() if "test[7]" in line)
    assert re.search(r" -(19|20)\.\d%$", line.rstrip())


def test_a_faster_point_is_no_alarm(runs, capsys):
    assert runs(shares(1), shares(2, factors={3: 1.25})) == (0, [], [3], [])
    assert "1 faster" in capsys.readouterr().out


def verdicts(seed, points, between, factors=None) -> list[str]:
    """The verdicts on all points of two made-up runs."""
    runs = shares(seed, points=points, between=between), shares(100 + seed, points=points, between=between, factors=factors)
    old, new = ({name: {"shares": rows, "cpu": "a CPU", "threads": 2} for name, rows in run.items()} for run in runs)
    return [change.verdict for change in compare.compare(old, new)]


@pytest.mark.parametrize(("points", "pairs"), [(24, 10), (200, 2)])
@pytest.mark.parametrize("between", [0.0, 0.01, 0.02])
def test_two_runs_of_the_same_code_do_not_alarm(between, points, pairs):
    """Also where runs differ by more than their rounds do. One pair in 100 may alarm."""
    found = [verdicts(seed, points, between) for seed in range(pairs)]
    assert sum("slower" in each for each in found) <= 1
    assert sum("faster" in each for each in found) <= 1


@pytest.mark.parametrize("between", [0.0, 0.01])
def test_ten_percent_are_found(between):
    """In one point, typically."""
    found = [verdicts(seed, 40, between, {9: 0.9}) for seed in range(10)]
    assert sum(each[9] == "slower" for each in found) >= 7


def test_points_that_drift_say_how_much_a_point_has_to_fall(runs):
    factors = {9: 0.88}
    assert runs(shares(1), shares(2, factors=factors))[:2] == (1, [9])
    assert runs(shares(1, between=0.04), shares(2, between=0.04, factors=factors))[:2] == (0, [])


def test_rounds_that_do_not_agree_are_not_judged(runs, capsys):
    """Somebody else used the machine for some of them."""
    old, new = shares(1), shares(2)
    name = list(old)[50]
    new[name] = [*(0.2 * np.exp(0.4 * np.random.default_rng(3).standard_normal(ROUNDS)))]
    assert runs(old, new) == (0, [], [], [50])
    assert re.search(r"test\[50\] +rounds deviate by 2% +by [2-6]\d%", capsys.readouterr().out)


def test_few_rounds_that_agree_by_chance(runs):
    """Three rounds with next to no spread are no proof; the change is above the floor."""
    old, new = shares(1, points=9), shares(2, points=9)
    name = list(old)[5]
    old[name], new[name] = [0.5, 0.52, 0.54], [0.45, 0.46, 0.5]
    assert runs(old, new)[:2] == (0, [])


def test_all_points_slower_alike(runs):
    """That is no noise: most points are slower."""
    status, slower, *_ = runs(shares(1), shares(2, factors=dict.fromkeys(range(POINTS), 0.85)))
    assert status == 1
    assert len(slower) > 0.9 * POINTS


def test_changes_below_the_floors(runs):
    """7 % of a share, and half a percentage point: 1.5 % that become 1.2 % are no news."""
    assert runs(shares(1, noise=1e-4), shares(2, noise=1e-4, factors={4: 0.94})) == (0, [], [], [])
    small = {f"test[{i}]": [share / 10 for share in rows] for i, rows in enumerate(shares(1, points=20).values())}
    smaller = {name: [0.8 * share if name == "test[2]" else share for share in rows] for name, rows in small.items()}
    assert runs(small, smaller) == (0, [], [], [])


def test_a_count_is_no_sample(runs):
    """Packed bytes over a checkpoint's: one figure, whose change is real."""
    assert runs({"memory": [1.0]}, {"memory": [0.9]})[:2] == (1, [0])


def test_a_point_on_another_machine_state_is_not_judged(runs, capsys):
    """Whichever limit it is and whichever way it moved; 25 % is where it begins, and points without limits are judged."""
    slower = dict.fromkeys((3, 4, 5, 6), 0.5)
    before = {key: {"limit_read_gb_s": 30.0, "limit_gflop_s": 400.0} for key in (3, 4, 5)}
    after = {
        3: {"limit_read_gb_s": 23.9, "limit_gflop_s": 400.0},
        4: {"limit_read_gb_s": 30.0, "limit_gflop_s": 501.0},
        5: {"limit_read_gb_s": 37.4, "limit_gflop_s": 321.0},
    }
    assert runs(shares(1), shares(2, factors=slower), before, after) == (1, [5, 6], [], [3, 4])
    out = capsys.readouterr().out
    assert "2 not judged: the machine was in another state" in out
    assert re.search(r"test\[3\] +30\.0 GB/s +23\.9 GB/s +-20\.3%", out)
    assert re.search(r"test\[4\] +400\.0 GFLOP/s +501\.0 GFLOP/s +\+25\.2%", out)


def test_a_share_of_one_stream_is_not_judged_beside_others(runs, capsys):
    """What was best of several reads more, and may have been one. Points without the limit are judged."""
    slower = dict.fromkeys((3, 4, 5), 0.5)
    limit = {"limit_read_gb_s": 30.0}
    before = {3: limit, 4: limit | {"read_streams": 4}, 5: {}}
    after = {3: limit | {"read_streams": 1}, 4: limit | {"read_streams": 8}, 5: {"read_streams": 8}}
    assert runs(shares(1), shares(2, factors=slower), before, after) == (1, [4, 5], [], [3])
    assert re.search(r"test\[3\] +1 alone streams +1 streams", capsys.readouterr().out)


def latencies(seed, middle) -> dict:
    """What the pool's points record: most rounds near the middle, a third of them far above, and shares that swing."""
    rng = np.random.default_rng(seed)
    rounds = middle * np.exp(0.1 * rng.standard_normal(300)) * np.where(rng.random(300) < 0.3, 20, 1)
    return {"rounds_us": [*rounds]}


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (44.0, 60.0, ""),  # swings
        (44.0, 110.0, "slower"),
        (0.1, 0.4, ""),  # below what matters
        (0.6, 3.0, "slower"),
        (3.0, 0.6, "faster"),
    ],
)
def test_latencies_are_times(tmp_path, before, after, verdict):
    """The shares, of a handoff that takes another time in each run, say nothing: they are 0.1 % and 0.04 % here."""
    old = save(tmp_path / "old.json", {"pool": [0.001] * 300}, {0: latencies(1, before)})
    new = save(tmp_path / "new.json", {"pool": [0.0004] * 300}, {0: latencies(2, after)})
    (change,) = compare.compare(compare.read(Path(old)), compare.read(Path(new)))
    assert change.verdict == verdict
    assert change.old.endswith(" us")


def test_no_point_left_to_judge(tmp_path, capsys):
    """What was found is shown all the same, and the state of the machine in each run."""
    half = save(tmp_path / "half.json", shares(1), {key: {"limit_gflop_s": 200.0 + key} for key in range(POINTS)})
    whole = save(tmp_path / "whole.json", shares(2), {key: {"limit_gflop_s": 400.0} for key in range(POINTS)})
    assert compare.main([half, whole]) == 2
    out, err = capsys.readouterr()
    assert err == "bench-compare: no point can be judged: the machine was in another state\n"
    assert f"{POINTS} not judged: the machine was in another state" in out
    assert re.search(r"test\[2\] +400\.0 GFLOP/s +202\.0 GFLOP/s +-49\.5%", out)
    assert f"the machine in {whole}: limit 400.0 GFLOP/s, rounds deviate by 2%\n" in out
    assert f"the machine in {half}: limit {200 + (POINTS - 1) / 2:.1f} GFLOP/s, rounds deviate by 2%\n" in out


def test_names_in_tables_are_as_they_are(tmp_path, capsys):
    """rich would take [hot] for a style."""
    files = [
        save(tmp_path / f"{i}.json", {"test_wake_up[hot]": [share, share * 1.01, share], "test_wake_up[cold]": [0.5] * 5})
        for i, share in enumerate((0.2, 0.4))
    ]
    assert compare.main(files) == 1
    assert re.search(r"test_wake_up\[hot\] +40\.0% +20\.0% +-50\.0%", capsys.readouterr().out)


def test_points_that_only_one_run_has(tmp_path, capsys):
    old, new = shares(1), shares(2)
    del new["bench/test_x.py::test[0]"], old["bench/test_x.py::test[1]"]
    files = save(tmp_path / "new.json", new), save(tmp_path / "old.json", old)
    assert compare.main([*files]) == 0
    out = capsys.readouterr().out
    assert f"only in {files[1]}: bench/test_x.py::test[0]\n" in out
    assert f"only in {files[0]}: bench/test_x.py::test[1]\n" in out


# Refusals


def refused(capsys, *arguments) -> str:
    assert compare.main([*arguments]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


@pytest.mark.parametrize(("key", "was", "value"), [("cpu", "a CPU", "another CPU"), ("threads", 2, 4)])
def test_other_conditions(tmp_path, capsys, key, was, value):
    old, new = save(tmp_path / "old.json", shares(1)), save(tmp_path / "new.json", shares(2), **{key: value})
    message = refused(capsys, new, old)
    assert message == f"bench-compare: {key} is {value} in the new run and {was} in the old one\n"


def test_no_point_in_common(tmp_path, capsys):
    old = save(tmp_path / "old.json", {"a": [0.5]})
    new = save(tmp_path / "new.json", {"b": [0.5]})
    assert "no point can be judged" in refused(capsys, new, old)


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
    assert f"{gone}: expected a run that make bench saved, found FileNotFoundError" in refused(capsys, str(gone), good)
    assert f"{gone}: expected a run that make bench saved, found FileNotFoundError" in refused(capsys, good, str(gone))


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
    assert "expected a saved run, found none; make bench saves one" in refused(capsys)
    save(tmp_path / ".benchmarks" / "Linux" / "0001_commit.json", shares(1))
    assert "expected a run that was saved before .benchmarks/Linux/0001_commit.json, found none" in refused(capsys)
    assert "no saved run has the number 7" in refused(capsys, "7")
