"""docs/formats.md: its table of what kernels have follows from the formats and the kernel tables, and is up to date."""

from pathlib import Path

import pytest

from ktmoe import ExpertWeights
from ktmoe._native import core, isa
from ktmoe.backends import native
from ktmoe.weights import ggml
from ktmoe.weights.formats import FORMATS

PAGE = Path(__file__).parents[1] / "docs" / "formats.md"
SIZE = 4096
#: The formats of each table: all but GGUF's, and GGUF's.
TABLES = {"kernels": FORMATS, "ggml kernels": ggml.GGML}


def rows(formats):
    tables = [native.load_table(row) for row in isa.ISAS]
    for name, weight_format in formats.items():
        modes = [mode for mode in ("bf16", "int16", "int8") if any(table.serves(weight_format, mode) for table in tables)]
        experts = ExpertWeights(1, SIZE, SIZE, None, weight_format)
        growth = core.expert_nbytes(experts, [(0, SIZE)]) / experts.nbytes - 1
        yield name, weight_format.description, ", ".join(modes), f"{100 * growth:+.2f} %".replace("-0.00", "+0.00")


@pytest.mark.parametrize("name", TABLES)
def test_the_table(name):
    lines = [
        "| format | components | modes | packed |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows(TABLES[name])),
    ]
    table = "\n".join(lines)
    text = PAGE.read_text().partition(f"<!-- table: {name} -->\n")[2].partition(f"\n<!-- end of {name} -->")[0]
    assert text == table, f"docs/formats.md must have:\n{table}"


def test_every_instruction_set_has_all_formats():
    """Those of no mode of integers alone."""
    for row in isa.ISAS:
        table = native.load_table(row)
        served = [table.serves(weight_format, "bf16") for formats in TABLES.values() for weight_format in formats.values()]
        assert all(served) or not any(served)


def test_packed_weights_grow_by_at_most_one_percent():
    assert all(float(growth.split()[0]) <= 1 for *_, growth in rows(FORMATS))


def test_packed_records_grow_by_at_most_three_percent():
    """Each code has as many bits as in its file; scales of 6 bits per 32 have bytes. Nor does any lose anything."""
    growths = {name: float(growth.split()[0]) for name, *_, growth in rows(ggml.GGML)}
    assert {"Q2_K", "Q3_K", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "TQ2_0"} <= set(growths)
    assert all(0 <= growth <= 3 for growth in growths.values())
    assert {name for name, growth in growths.items() if growth} == {"Q4_K", "Q5_K", "IQ4_XS"}
