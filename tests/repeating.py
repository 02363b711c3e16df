"""How many random cases a test of reliability runs: all in `make soak`, a tenth in `make verify`, a thousandth in `make test`.

Such a test takes the fixture ``repeat`` and asks it for the numbers of its cases, from 0. A case's random numbers come from its
number alone, so that a case that fails can be run again:

    def test_headers(repeat):
        for number in repeat("headers of safetensors files", 1_000_000):
            rng = np.random.default_rng(number)
            ...
            repeat.most("ms", milliseconds)  # the largest so far

`make soak` has HOURS. Each of its tests gets an equal part of the time that is left, and stops there. It saves what was done.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator

import pytest

from bench import machine
from bench.soak import SAVED

#: One of so many cases runs, by the option that chooses tests.
OF_ALL = {"soak": 1, "exhaustive": 10, "rest": 10, None: 1000, "smoke": 1000}


class Repeat:
    """What one test does. how: the option that chose it, a key of OF_ALL. deadline: of time.monotonic(), or None."""

    def __init__(self, how: str | None, deadline: float | None = None):
        self.how, self.deadline, self.rows = how, deadline, []

    def __call__(self, what: str, total: int, least: int = 1) -> Iterator[int]:
        """The numbers of this run's cases.

        what: the cases, as a table names them. total: their number in `make soak`. least: in any run.
        """
        begun, row = time.monotonic(), self.row(what, total)
        for number in range(self.count(total, least)):
            yield number
            row["done"] = number + 1
            row["seconds"] = time.monotonic() - begun
            if self.late():
                return

    def count(self, total: int, least: int = 1) -> int:
        """The number of cases of this run, of so many in `make soak`."""
        return min(total, max(least, total // OF_ALL[self.how]))

    def late(self) -> bool:
        """Whether this test's part of the time of `make soak` is over."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def seconds(self) -> float | None:
        """What is left of this test's part of the time of `make soak`; None in other runs."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def row(self, what: str, total: int, done: int = 0) -> dict:
        """A new row of the table of what was done: its fields may be changed until the test ends."""
        self.rows.append({"what": what, "of": total, "done": done, "seconds": 0.0, "most": {}})
        return self.rows[-1]

    def most(self, label: str, value: float) -> None:
        """Keep the largest value so far of the row that was begun last."""
        most = self.rows[-1]["most"]
        most[label] = max(value, most.get(label, value))


def pytest_addoption(parser):
    parser.addoption("--soak", action="store_const", dest="choice", const="soak", help="run all cases of tests that repeat")
    parser.addoption("--hours", type=float, default=1.0, help="how long --soak may take (default 1)")


def pytest_sessionstart(session):
    session.config._ktmoe_begun = time.monotonic()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    session.config._ktmoe_left = len(session.items)


@pytest.fixture
def repeat(request):
    config, how = request.config, request.config.getoption("choice")
    deadline = None
    if how == "soak":
        processes = getattr(config, "workerinput", {}).get("workercount", 1)
        end = config._ktmoe_begun + 3600 * config.getoption("hours")
        now = time.monotonic()
        deadline = now + max(1.0, (end - now) * processes / max(config._ktmoe_left, processes))
        config._ktmoe_left -= processes  # as far as this process can tell
    made = Repeat(how, deadline)
    yield made
    if how == "soak":
        SAVED.mkdir(parents=True, exist_ok=True)
        name = "".join(c if c.isalnum() else "-" for c in request.node.nodeid)
        about = {"test": request.node.nodeid, "date": f"{datetime.date.today()}", "commit": machine.commit()}
        (SAVED / f"{name}.json").write_text(json.dumps(about | {"rows": made.rows}))
