"""Random calls of all native code under AddressSanitizer and UBSan: nothing is reported, and bits are the normal module's."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from sanitizers import build, run_cases, works

AT_ONCE = 240


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    if not works("address,undefined", tmp_path_factory.mktemp("probe")):
        pytest.skip("the compiler has no -fsanitize=address,undefined that works here")
    return build()


def found(done):
    """What cases printed, by number."""
    return {line["case"]: line for line in map(json.loads, done.stdout.splitlines()) if "case" in line}


def test_cases(module, repeat):
    """The same number gives the same case again: python tests/sanitize/run_cases.py - NUMBER END."""
    for number in repeat(f"{AT_ONCE} random calls under sanitizers", 2_000):
        first, end = number * AT_ONCE, (number + 1) * AT_ONCE
        with ThreadPoolExecutor(2) as pool:
            watched, normal = pool.map(run_cases, (module, None), (first, first), (end, end))
        assert normal.returncode == 0, normal.stderr[-4000:]
        assert watched.returncode == 0, f"{watched.stdout.splitlines()[-1:]}\n{watched.stderr[-8000:]}"
        assert found(watched) == found(normal)
        assert set(found(normal)) == set(range(first, end))
