"""docs/quantizing.md: its tables follow from the rules and the targets."""

from pathlib import Path

import pytest

from ktmoe.quantization import RULES, TARGETS, Quantizer
from ktmoe.quantization.rules import QUOTIENTS, TIES

PAGE = Path(__file__).parents[1] / "docs" / "quantizing.md"


def of_targets():
    yield "| `to` | format | default group | default rule |"
    yield "|---|---|---|---|"
    for name, target in TARGETS.items():
        quantizer = Quantizer(name)
        yield f"| `{name}` | {quantizer.format.description} | {target.group} | `{quantizer.rule.name}` |"


def of_rules():
    yield "| `to` | `rule` | scale s | of a group of zeros | t | ties go to | codes | whose |"
    yield "|---|---|---|---|---|---|---|---|"
    for rule in RULES.values():
        zeros = "no -0" if not rule.negative_zero else "" if rule.zero_signed else "-0 becomes 0"
        codes = f"{rule.codes[0]} to {rule.codes[1]}" if rule.codes else zeros
        ties = "" if rule.ties == "even" else TIES[rule.ties]
        words = rule.scale, rule.zeros, rule.quotient, ties, codes, rule.source
        yield f"| `{rule.target}` | `{rule.name}` | {' | '.join(words)} |"


def of_quotients():
    yield "| t | is |"
    yield "|---|---|"
    yield from (f"| {name} | {words} |" for name, words in QUOTIENTS.items())


@pytest.mark.parametrize(("name", "lines"), [("targets", of_targets), ("rules", of_rules), ("quotients", of_quotients)])
def test_tables(name, lines):
    table = "\n".join(lines())
    text = PAGE.read_text().partition(f"<!-- table: {name} -->\n")[2].partition(f"\n<!-- end of {name} -->")[0]
    assert text == table, f"docs/quantizing.md must have:\n{table}"
