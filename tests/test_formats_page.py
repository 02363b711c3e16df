"""docs/formats.md: its tables of what kernels have follow from the formats and the kernel tables, and are up to date."""

import re
from pathlib import Path

import pytest

from ktmoe import ExpertWeights
from ktmoe._native import core, isa
from ktmoe.backends import native
from ktmoe.weights import ggml
from ktmoe.weights.formats import FORMATS

PAGE = Path(__file__).parents[1] / "docs" / "formats.md"
SIZE = 4096
#: Modes of a format -> what its row says of modes of integers. A format has both of them or none.
INTEGERS = {("bf16", "int16", "int8"): "yes", ("bf16",): ""}


def rows(formats):
    tables = [native.load_table(row) for row in isa.ISAS]
    for name, weight_format in formats.items():
        modes = tuple(mode for mode in ("bf16", "int16", "int8") if any(table.serves(weight_format, mode) for table in tables))
        experts = ExpertWeights(1, SIZE, SIZE, None, weight_format)
        growth = core.expert_nbytes(experts, [(0, SIZE)]) / experts.nbytes - 1
        yield name, weight_format.description, modes, f"{100 * growth:+.2f} %".replace("-0.00", "+0.00")


def of_formats():
    yield "| format | components | int16, int8 |"
    yield "|---|---|---|"
    yield from (f"| {name} | {components} | {INTEGERS[modes]} |" for name, components, modes, _ in rows(FORMATS))


def of_ggml():
    """GGUF's types: those that have the same modes stand in one row."""
    alike = {}
    for name, _, modes, _ in rows(ggml.GGML):
        alike.setdefault(modes, []).append(name)
    yield "| types | int16, int8 |"
    yield "|---|---|"
    yield from (f"| {', '.join(names)} | {INTEGERS[modes]} |" for modes, names in alike.items())


@pytest.mark.parametrize(("name", "lines"), [("kernels", of_formats), ("ggml kernels", of_ggml)])
def test_the_table(name, lines):
    table = "\n".join(lines())
    text = PAGE.read_text().partition(f"<!-- table: {name} -->\n")[2].partition(f"\n<!-- end of {name} -->")[0]
    assert text == table, f"docs/formats.md must have:\n{table}"


def test_every_instruction_set_has_all_formats():
    """Those of no mode of integers alone."""
    for row in isa.ISAS:
        table = native.load_table(row)
        served = [table.serves(weight_format, "bf16") for formats in (FORMATS, ggml.GGML) for weight_format in formats.values()]
        assert all(served) or not any(served)


def test_packed_weights_grow_by_at_most_one_percent():
    assert all(float(growth.split()[0]) <= 1 for *_, growth in rows(FORMATS))


def test_the_types_that_grow_more_are_named():
    """With the growth that the page says, to a tenth of a percent."""
    growths = {name: float(growth.split()[0]) for name, *_, growth in rows(ggml.GGML)}
    found = {name: f"{growth:.1f}" for name, growth in growths.items() if growth > 1}
    sentence = re.search(r"Packed weights are at most 1 % larger.*?\n\n", PAGE.read_text(), re.DOTALL)[0]
    assert dict(re.findall(r"(\w+) (?:is )?([\d.]+) %(?: larger)?[,.]", sentence.partition(";")[2])) == found


def test_packed_records_grow_by_at_most_three_percent():
    """Each code has as many bits as in its file; scales of 6 bits per 32 have bytes. Nor does any lose anything."""
    growths = {name: float(growth.split()[0]) for name, *_, growth in rows(ggml.GGML)}
    assert {"Q2_K", "Q3_K", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "TQ2_0"} <= set(growths)
    assert all(0 <= growth <= 3 for growth in growths.values())
    assert {name for name, growth in growths.items() if growth} == {"Q4_K", "Q5_K", "IQ4_XS"}
