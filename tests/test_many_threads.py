"""The bits are the same for 1 to 256 threads, however the work is cut and dealt, and on made-up nodes of any size.

Threads wait without spinning, as always where there are more of them than CPUs. CPUs that do not exist refuse a node's threads,
which then run anywhere.
"""

import itertools
import math

import numpy as np
import pytest
from alone import CROWD, POOL, REPEATED, SKIPPED, Case
from helpers import BF16, KINDS, MIXED
from topology import CPUS

from ktmoe import set_num_threads
from ktmoe._native import core
from ktmoe.experts import ROUTER_WEIGHTS
from ktmoe.machine import threads

THREADS = (1, 2, 3, 5, 8, 9, 16, 17, 31, 33, 64, 127, 128, 255, 256)
TOKENS = (1, 2, 3, 7, 16, 64, 65, 200)
SETTINGS = {
    "scratch_bytes": (256 << 20, 256 << 20, 8 << 20, 2 << 20, 1),
    "reduce_slots": (0, 0, 256, 10**9),
    "ranges": (0, 2, 3, 7, 300),
    "halves": (0, 1, 2),
    "uneven": (0, 1, 7, 0xDEADBEEF),
    "only_many": (False, True),
    "by_turns": (True, True, False),
}
#: Tokens of Case: any; of three experts; of one; one at the end, after many that no expert has.
BATCHES = {
    "any": lambda rng, tokens: rng.integers(0, POOL, tokens),
    "three experts": lambda rng, tokens: rng.integers(0, len(CROWD), tokens),
    "one expert": lambda rng, tokens: np.full(tokens, REPEATED),
    "mostly skipped": lambda rng, tokens: np.array([SKIPPED] * (tokens - 1) + [rng.integers(POOL)]),
}
#: Each with one of the forms, in turn.
KINDS_OF_LAYERS = {**KINDS, **{name: MIXED[name] for name in ("b16 and int4", "int4 and mxfp4", "q4 and f8", "int")}}
FORMS = list(itertools.product(ROUTER_WEIGHTS, (BF16, np.float32)))
#: CPUs of each node.
NODES = {
    "one": (32,),
    "two": (32, 32),
    "two of one CPU": (1, 1),
    "small and large": (1, 32),
    "three": (5, 16, 2),
    "four": (8, 8, 8, 8),
    "eight": (32,) * 8,
    "eight uneven": (1, 32, 2, 7, 16, 3, 12, 9),
}


@pytest.fixture(autouse=True)
def no_spinning(monkeypatch):
    """CPUs that do not exist would count."""
    monkeypatch.setenv("KTMOE_SPIN_US", "0")


def draws(rng, count, choices):
    """Settings at random, such that of each kind every value occurs as often as any other."""
    columns = {name: [values[i % len(values)] for i in rng.permutation(count)] for name, values in choices.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def check(case, rng, count, numbers_of_threads, tokens=TOKENS):
    """Check a case with so many draws of all choices."""
    choices = {"threads": numbers_of_threads, "tokens": tokens, "batch": tuple(BATCHES), **SETTINGS}
    for drawn in draws(rng, count, choices):
        batch = BATCHES[drawn.pop("batch")](rng, drawn.pop("tokens"))
        set_num_threads(drawn.pop("threads"))
        core.tune(**drawn)
        case.check(batch)


@pytest.mark.cover("values")
@pytest.mark.parametrize("name", KINDS_OF_LAYERS)
def test_layers_of_every_kind(backend, is_emulated, name):
    number = list(KINDS_OF_LAYERS).index(name)
    rng, form = np.random.default_rng(number), FORMS[number % len(FORMS)]
    if is_emulated:
        with Case(backend, KINDS_OF_LAYERS[name], *form) as case:
            check(case, rng, 3, (2, 5, 33), (1, 3, 17))
    else:
        with Case(backend, KINDS_OF_LAYERS[name], *form, (328, 264), num_experts=9) as case:
            check(case, rng, len(THREADS), THREADS)


@pytest.mark.cover("values")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_router_weights_and_dtypes(backend, is_emulated, form):
    rng = np.random.default_rng(FORMS.index(form))
    with Case(backend, KINDS["folded"], *form) as case:
        check(case, rng, *((3, (2, 9, 20), (2, 18, 33)) if is_emulated else (10, THREADS)))


def test_one_panel_for_all_threads():
    """Hidden and intermediate sizes of one panel: most threads find nothing."""
    with Case("auto", KINDS["folded"], dtype=np.float32, shape=(64, 32)) as case:
        for count, tokens, reduce_slots in itertools.product((2, 16, 256), (1, 7, 65), (0, 10**9)):
            set_num_threads(count)
            for halves, ranges, uneven in ((1, 1, 0), (2, 2, 0), (2, 65, 5)):
                core.tune(reduce_slots=reduce_slots, halves=halves, ranges=ranges, uneven=uneven)
                case.check(np.arange(tokens) % POOL)


def test_masked_experts():
    with Case("auto", KINDS["folded"], dtype=np.float32) as case:
        case.layer.expert_mask[[0, 4]] = False
        case.alone = np.concatenate([case.forward([token]) for token in range(POOL)])
        assert not case.alone[REPEATED].any()
        check(case, np.random.default_rng(1), 20, THREADS)


@pytest.mark.cover("values")
@pytest.mark.parametrize("name", NODES)
def test_nodes(backend, is_emulated, fake_nodes, monkeypatch, name):
    """All but node 0's first CPU are made up. Fewer threads than nodes, one for each, one for each CPU, and more."""
    monkeypatch.setattr(threads, "cgroup_quota", lambda: math.inf)
    sizes, numbers = NODES[name], iter(range(2000, 4000))
    cpus = {node: {next(numbers) for _ in range(size)} for node, size in enumerate(sizes)}
    cpus[0] = cpus[0] - {2000} | {CPUS[0]}
    fake_nodes(cpus, usable=set().union(*cpus.values()))
    shape = 72 if is_emulated else 328, 32 * len(sizes) + 8
    with Case(backend, KINDS["unfolded"], dtype=np.float32, shape=shape, numa_nodes=list(cpus)) as case:
        set_by_user = (1, 2, len(sizes), sum(sizes), sum(sizes) + 3)
        check(case, np.random.default_rng(len(name)), *((2, (3, 20), (1, 18)) if is_emulated else (10, set_by_user)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(1, 257, 16))
def test_every_number_of_threads(first):
    with Case("auto", KINDS["int4-64"], dtype=np.float32, shape=(328, 264)) as case:
        for count in range(first, first + 16):
            check(case, np.random.default_rng(count), 3, (count,))
