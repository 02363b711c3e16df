"""repeating.py: each run does its share of the cases, from the first one, and what it saves says how many were done."""

import os
import time

import pytest
import repeating
from repeating import Repeat

import bench.soak
from bench.results_file import Results, check
from bench.results_schema import SCHEMA


@pytest.mark.parametrize(
    ("how", "total", "least", "expected"),
    [("soak", 5000, 1, 5000), ("rest", 5000, 1, 500), (None, 5000, 1, 5), (None, 50, 1, 1), (None, 50, 3, 3), (None, 2, 3, 2)],
)
def test_shares(how, total, least, expected):
    repeat = Repeat(how)
    assert list(repeat("cases", total, least)) == list(range(expected))
    assert [(row["done"], row["of"]) for row in repeat.rows] == [(expected, total)]


def test_a_case_in_which_a_test_ends_is_not_done():
    repeat = Repeat("soak")
    for number in repeat("cases", 10):
        if number == 4:
            break
    assert repeat.rows[0]["done"] == 4


def test_the_time_ends():
    repeat = Repeat("soak", deadline=time.monotonic() + 0.05)
    for _ in repeat("slow cases", 10**9):
        time.sleep(0.01)
    assert 0 < repeat.rows[0]["done"] < 100
    assert repeat.late()
    assert repeat.seconds() == 0


TESTS = """
def test_first(repeat):
    for number in repeat("numbers", 40):
        repeat.most("largest", number)
        repeat.most("negated", -number)

def test_other():
    raise AssertionError("--soak runs tests that repeat, and no others")
"""


def test_what_is_saved(tmp_path, monkeypatch, capfd):
    (tmp_path / "test_repeated.py").write_text(TESTS)
    monkeypatch.setattr(repeating, "SAVED", tmp_path / "saved")
    plugins = ["-p", "design", "-p", "repeating", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull]
    status = pytest.main(["-q", "--soak", "--hours=0.01", *plugins, str(tmp_path / "test_repeated.py")])
    assert status == pytest.ExitCode.OK, capfd.readouterr()
    (saved,) = bench.soak.saved(tmp_path / "saved")
    assert saved["test"].endswith("test_repeated.py::test_first")
    (row,) = saved["rows"]
    assert (row["what"], row["done"], row["of"], row["most"]) == ("numbers", 40, 40, {"largest": 39, "negated": 0})
    other = saved | {"rows": [row | {"what": "numbers: odd"}, row | {"what": f"{bench.soak.TERMS}avx2", "most": {"gate": 0.5}}]}
    section = bench.soak.published([saved, other])
    check(section, "soak", SCHEMA["soak?"])
    cpu = {"name": "Made", "family": 1, "model": 2, "threads": 2}
    results = [Results({"cpu": cpu, "soak": section}), Results({"cpu": cpu})]
    row = ("numbers", "80", "largest 39; negated 0")
    assert bench.soak.table(results) == (("what, on Made 1-2", "cases", "most"), [row])
    assert bench.soak.terms(results) == (("backend, on Made 1-2", "gate", "cases"), [("avx2", "0.50", "40")])
    section["row"][0]["done"] = 79
    other = Results({"cpu": cpu | {"name": "Other"}, "soak": section})
    heads, rows = bench.soak.table([*results, other])
    assert heads == ("what", "cases", "most", "CPU")
    assert [(cases, label) for _, cases, _, label in rows] == [("79 of 80", "Made 1-2"), ("79 of 80", "Other 1-2")]
