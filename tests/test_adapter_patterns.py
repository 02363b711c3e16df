"""rank_pattern and alpha_pattern: by PEFT's own rule, in bounded work."""

from __future__ import annotations

import random
import re

import adapter_files as files
import numpy as np
import pytest
from adapter_files import MODULE, QWEN

from ktmoe.adapters import import_adapter, patterns
from ktmoe.adapters.patterns import Patterns
from ktmoe.errors import CheckpointError

#: What names and patterns are drawn from: few words, so that many match, and dots that may stand for other characters.
WORDS = ("a", "b", "aa", "a_b", "ab", "1", "2", "12", "w1", "w12", "1a", "layers", "experts")
WILD = (".*", r"\d+", "[0-9]+")


def by_peft(values: dict[str, int], name: str) -> int | None:
    """get_pattern_key() of PEFT 0.21.2: the first pattern that all of the name, or what is behind one of its dots, is."""
    return next((value for key, value in values.items() if re.match(rf"(.*\.)?({key})$", name)), None)


def drawn(draw: random.Random) -> str:
    """A pattern that ktmoe reads."""
    words = [draw.choice(WORDS) for _ in range(draw.randint(1, 4))]
    if draw.random() < 0.3:
        words[draw.randrange(len(words))] = draw.choice(WILD)
    pattern = "".join(word + draw.choice((".", r"\.", r"\.", "")) for word in words[:-1]) + words[-1]
    if draw.random() < 0.3:
        cut = sorted(draw.randint(0, len(pattern)) for _ in range(2))
        inner = "|".join(draw.sample(("", "a", "1", "b.", r"1\.a"), draw.randint(1, 3)))
        pattern = f"{pattern[: cut[0]]}({inner}){pattern[cut[1] :]}"
    return draw.choice(("", "", "", "", ".*", "|", "a|")) + pattern


def test_random_patterns_mean_what_they_do_in_peft():
    draw, matched, refused = random.Random(1), 0, 0
    names = [".".join(draw.choice(WORDS) for _ in range(draw.randint(1, 5))) for _ in range(200)]
    for _ in range(4000):
        values = {drawn(draw): number for number in range(draw.randint(1, 5))}
        try:
            found = Patterns("p", values)
        except CheckpointError:  # which one that was cut may be
            refused += 1
            continue
        for name in draw.sample(names, 8):
            expected = by_peft(values, name)
            assert found.value(name, None) == expected, (values, name)
            matched += expected is not None
    assert matched > 3000
    assert refused < 2000


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        (".*", "a.b", True),
        ("w.", "experts.w1", True),
        ("experts.1.up_proj", "mlp.experts.11.up_proj", False),
        (r"layers.\d+.mlp", "layers.12.mlp", True),
        (r"layers.\d+.mlp", "layers.1.2.mlp", False),
        (r"1\d+", "12", True),
        ("a|b.c", "x.a", True),
        ("(a|)b", "b", True),
        ("b", "ab", False),
    ],
)
def test_patterns(pattern, name, matches):
    assert (by_peft({pattern: 1}, name) == 1) == matches
    assert (Patterns("p", {pattern: 1}).value(name, None) == 1) == matches


@pytest.mark.parametrize(
    "pattern",
    ["a.*b.*", "(a)(b)", "((a))", "(a", "a)", ")a(", "(a.)*", "(a)+", ".(*)", "a+", "[ab]", "^a", "a$", "a\\", r"\w", "a{9}"],
)
def test_what_may_take_long_is_refused(pattern):
    with pytest.raises(CheckpointError, match=r"p: expected names of parameters or modules, with \.\* at most once"):
        Patterns("p", {pattern: 1})


@pytest.mark.parametrize(
    ("form", "characters"),
    [
        ("model.layers.{}.mlp.experts.{}.gate_proj", 2),
        (r"model\.layers\.{}\.mlp\.experts\.{}\.gate_proj", 1),
        (r"model\.layers\.{}\.mlp{}\.experts\.\d+\.gate_proj", 1),
    ],
)
def test_20_000_names_cost_no_more_than_a_few(monkeypatch, form, characters):
    """By what the limit counts: dots that are not escaped stand at a few places, however many names there are."""
    name = form.replace("\\", "").replace("d+", "7").format(99, 199)
    monkeypatch.setattr(patterns, "COMPARED", 4 * characters * len(name))
    found = Patterns("p", {form.format(*divmod(number, 200)): number for number in range(20_000)})
    assert found.value(name, None) == 19_999


def test_limits(tmp_path, monkeypatch):
    """On how many patterns there are, how long they are, and how often names are compared."""
    for values, message in (
        ({str(number): 1 for number in range(20_001)}, "p: expected an object of at most 20000 patterns"),
        ({"x" * 1001: 1}, "p: expected patterns of at most 1000 characters"),
        ({f"{'x' * 990}{number}": 1 for number in range(2100)}, "p: expected at most 2000000 characters with all alternatives"),
        ({f"{'x' * 490}({number}{'|' * 490})": 1 for number in range(20)}, "p: expected at most 2000000 characters"),
        ({f"{number}{'|a' * 300}": 1 for number in range(300)}, "p: expected at most 2000000 characters"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Patterns("p", values)
    monkeypatch.setattr(patterns, "COMPARED", 100 * 50)
    found = Patterns("p", {f"x{number}.*x": 1 for number in range(100)})
    assert found.value("y" * 50, 3) == 3
    with pytest.raises(CheckpointError, match=r"p: expected fewer patterns with \.\* or fewer names: 5000 characters"):
        found.value("y", 3)
    files.write(tmp_path, files.tensors_of(), alpha_pattern={f"x{number}.*x": 1 for number in range(200)})
    with pytest.raises(CheckpointError, match="alpha_pattern: expected fewer patterns"):
        import_adapter(tmp_path, QWEN)


def test_many_target_parameters(tmp_path):
    """Looked up, not compared one by one: a name's last segments, as in PEFT."""
    for targets, there in (
        ([f"x{number}.down_proj" for number in range(100_000)], False),
        ([f"x{number}.y" for number in range(100_000)] + ["gate_up_proj", f"{MODULE}.down_proj"], True),
        (["s.gate_up_proj", "xperts.down_proj"], False),
    ):
        files.write(tmp_path, files.tensors_of(), target_parameters=targets)
        if there:
            assert np.isfinite(import_adapter(tmp_path, QWEN)[0].scale)
            continue
        with pytest.raises(CheckpointError, match="nested where there are two, found 2 of them"):
            import_adapter(tmp_path, QWEN)
