"""Batch invariance over random cases: another process, which shares nothing with this one but the case's number, has its bits.

It has other threads, another way to split the work, other places of memory, other nodes, tokens in another order and in several
calls. In this process, some tokens are alone.
"""

import pytest
import ways
from helpers import same_bits
from random_bits import AT_ONCE, Cases, Elsewhere, here
from random_layers import FAMILIES, OF_INTEGERS

from ktmoe import set_num_threads

#: Subjects and families that go together: kernels of integers are not of all families.
PAIRS = [
    (name, family)
    for name, subject in ways.SUBJECTS.items()
    for family in (FAMILIES if subject.activations == "bf16" else OF_INTEGERS)
]
#: Cases of each backend, family and mode; of an emulated backend, which takes a hundred times as long.
TOTAL, EMULATED = 1000, 40


@pytest.fixture(scope="module")
def other_process(emulator_folder):
    other = Elsewhere(emulator_folder)
    yield other
    other.close()


@pytest.fixture
def subject(request):
    """The name in ways.SUBJECTS of what `backend` is."""
    return request.node.callspec.params["backend"]


def last_alone(layer, batch, y):
    """The last token has the same bits when it is alone, on one thread."""
    last = slice(len(y) - 1, len(y))
    set_num_threads(1)
    assert same_bits(layer.forward(*(of[last] for of in batch)), y[last])


@pytest.mark.cover("values")
@pytest.mark.usefixtures("three_nodes")
@pytest.mark.parametrize(("backend", "family"), PAIRS, indirect=["backend"])
def test_another_process_has_the_same_bits(backend, family, subject, is_emulated, other_process, repeat):
    of_integers = ways.SUBJECTS[subject].activations != "bf16"
    total = EMULATED if is_emulated else TOTAL
    for mode in ("auto", "mxfp4") if of_integers else ("auto", "mxfp8", "mxfp4"):
        for number in repeat(f"bits in two processes: {subject}, {family}, {mode}{', emulated' * is_emulated}", total):
            if number % AT_ONCE:
                continue  # it was computed with those before it
            cases = Cases(subject, family, mode, number, min(AT_ONCE, repeat.count(total) - number))
            other_process.ask(cases)
            found = here(cases, backend, last_alone)
            expected = other_process.answer()
            wrong = [number + case for case, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
            assert not wrong, f"{cases}: cases {wrong} have other bits in another process"
