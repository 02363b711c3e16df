"""tools/mutants.py: which mistakes it plants, which tests it runs beside them, and what it says of a mistake that lives."""

from __future__ import annotations

import importlib
import subprocess
import tomllib

import pytest
from environments import ROOT

PYTHON = '''
"""Adds 1 + 2."""
import sys

def least(values: list[int] = [1 + 1]) -> int | None:
    """The least of values > 3."""
    if not values or values[0] < 5:
        raise ValueError(f"{values[0] + 1} of 7")
    for value in values:
        if value is None:
            continue
        assert value > 3
        sys.audit(value, values)
    return min(value - 2 for value in values if value in "abc")
'''

C = """
#define TWICE(x) ((x) * 2) /* not < here */
static int sizes[4] = {1};
struct pair { int first[2]; };
int least(const int *values, int n) {
    int found[8], text = "a < b"[0]; // n < 2
    assert(n > 3);
    for (int i = 0; i < n; i++) {
        if (values[i] && n) break;
        found[i] = call(values + i, n);
    }
    prefetch(values + 1);
    return found[2] * -n;
}
"""


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("mutants")


def changes(mutations, text):
    return {(mutation.kind, *mutation.lines(text)) for mutation in mutations}


def test_mistakes_of_python(tool):
    found = changes(tool.mutations.of_python("a.py", PYTHON), PYTHON)
    head, loop = "if not values or values[0] < 5:", 'return min(value - 2 for value in values if value in "abc")'
    assert found == {
        (
            "constant",
            "def least(values: list[int] = [1 + 1]) -> int | None:",
            "def least(values: list[int] = [2 + 1]) -> int | None:",
        ),
        (
            "constant",
            "def least(values: list[int] = [1 + 1]) -> int | None:",
            "def least(values: list[int] = [1 + 2]) -> int | None:",
        ),
        (
            "operator",
            "def least(values: list[int] = [1 + 1]) -> int | None:",
            "def least(values: list[int] = [1 - 1]) -> int | None:",
        ),
        ("negated", head, "if (not (not values or values[0] < 5)):"),
        ("negated", head, "if (values) or values[0] < 5:"),
        ("operator", head, "if not values and values[0] < 5:"),
        ("operator", head, "if not values or values[0] <= 5:"),
        ("constant", head, "if not values or values[1] < 5:"),
        ("constant", head, "if not values or values[0] < 4:"),
        ("deleted", 'raise ValueError(f"{values[0] + 1} of 7")', "pass"),
        ("negated", "if value is None:", "if (not (value is None)):"),
        ("operator", "if value is None:", "if value is not None:"),
        ("deleted", "continue", "pass"),
        ("deleted", "sys.audit(value, values)", "pass"),
        ("swapped", "sys.audit(value, values)", "sys.audit(values, value)"),
        ("returned", loop, "return None"),
        ("operator", loop, loop.replace("-", "+")),
        ("constant", loop, loop.replace("2", "3")),
        ("operator", loop, loop.replace('value in "', 'value not in "')),
        ("negated", loop, loop.replace('value in "abc"', '(not (value in "abc"))')),
    }


def test_mistakes_of_c(tool):
    found = changes(tool.mutations_c.of_c("a.c", C), C)
    head, called = "for (int i = 0; i < n; i++) {", "found[i] = call(values + i, n);"
    assert found == {
        ("constant", "static int sizes[4] = {1};", "static int sizes[4] = {2};"),
        ("constant", 'int found[8], text = "a < b"[0]; // n < 2', 'int found[8], text = "a < b"[1]; // n < 2'),
        ("constant", head, head.replace("= 0", "= 1")),
        ("operator", head, head.replace("<", "<=")),
        ("negated", "if (values[i] && n) break;", "if (!(values[i] && n)) break;"),
        ("operator", "if (values[i] && n) break;", "if (values[i] || n) break;"),
        ("deleted", "if (values[i] && n) break;", "if (values[i] && n) ;"),
        ("deleted", called, ";"),
        ("operator", called, called.replace("+", "-")),
        ("swapped", called, "found[i] = call(n, values + i);"),
        ("returned", "return found[2] * -n;", "return 0;"),
        ("constant", "return found[2] * -n;", "return found[3] * -n;"),
        ("operator", "return found[2] * -n;", "return found[2] / -n;"),
    }


def test_every_mistake_of_the_package_in_python_is_python(tool):
    """Of a few files that have most kinds of expressions."""
    for name in ("loaders/gptq.py", "reference/gradients.py", "weights/scales.py", "messages.py"):
        text = (ROOT / "ktmoe" / name).read_text()
        found = tool.mutations.of_python(name, text)
        assert len(found) > 20
        assert [mutation for mutation in found[::7] if not tool.mutations.compiles(mutation.of(text))] == []


def test_an_order_depends_on_the_seed_alone(tool):
    found = tool.mutations.of_python("a.py", PYTHON)
    orders = [tool.mutations.shuffled(found, seed) for seed in ("1", "1", "2")]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2], key=str) == sorted(found, key=str)


def test_every_file_has_tests(tool):
    tests = tool.Tests.read(ROOT / tool.MAP)
    patterns, named = {}, set()
    for file in sorted((ROOT / "ktmoe").rglob("*")):
        if file.suffix not in (".py", ".c", ".h", ".pyx", ".pxi", ".pxd"):
            continue
        name = str(file.relative_to(ROOT))
        of_file = [pattern for pattern in (*tests.left_out, *tests.tests) if tool.fnmatch.fnmatchcase(name, pattern)]
        assert of_file, f"tests/tests_of_files.toml has no tests for {name}"
        patterns.setdefault(of_file[0], name)
        named |= set(tests.of(name) or ())
    assert set(patterns) == {*tests.left_out, *tests.tests}, "each is the first that some file matches"
    assert [name for name in sorted(named) if name.endswith(".py") and not (ROOT / name).exists()] == []


def test_the_results_are_of_files_that_are_there(tool):
    saved = tomllib.loads((ROOT / tool.RESULTS).read_text())
    assert saved["drawn"] == len(saved["mutants"]) > 0
    for row in saved["mutants"]:
        assert (ROOT / row["file"]).is_file()
        assert row["outcome"] in (*tool.FOUND, tool.EXPLAINED), row
        assert (row["outcome"] == tool.EXPLAINED) == bool(row.get("reason")), row
    found = sum(row["outcome"] in tool.FOUND for row in saved["mutants"])
    page = " ".join((ROOT / "docs" / "reliability.md").read_text().split())
    assert f"Of {saved['drawn']} mistakes {found} were found." in page


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of one file, whose test tells the sum and not what it is multiplied with."""
    for name, text in {
        "ktmoe/a.py": "def total(a, b):\n    return (a + b) * 1\n",
        "tests/test_a.py": "from ktmoe.a import total\n\n\ndef test_total():\n    assert total(2, 3) == 5\n",
        "tests/tests_of_files.toml": 'left_out = {}\n[tests]\n"ktmoe/a.py" = "test_a.py"\n',
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return tmp_path


def test_what_becomes_of_mistakes(tool, project, capsys, monkeypatch):
    """The sum's sign is told. No input can tell a factor of 1 // 1, or of one that is written in brackets."""
    text = (project / "ktmoe" / "a.py").read_text()
    changes = (("+", ")"), ("+", "-"), ("1", "1 // 1"), ("1", "(1)"))
    drawn = [tool.mutations.Mutation("ktmoe/a.py", "constant", at := text.index(old), at + 1, new) for old, new in changes]
    monkeypatch.setattr(tool.Run, "candidates", lambda self, root, name: drawn)
    explained = {"file": "ktmoe/a.py", "kind": "constant", "outcome": "alive", "reason": "one is one"}
    explained |= {"before": "return (a + b) * 1", "after": "return (a + b) * 1 // 1"}
    (project / tool.RESULTS).write_text(tool.tomli_w.dumps({"mutants": [explained]}))
    assert tool.main(["--only", "ktmoe/a.py", "--count", "3", "--processes", "1", "--save"], project) == 1
    printed = capsys.readouterr().out
    assert "3 drawn, 1 found, 0 crashed, 0 timeout, 1 explained, 1 alive, 1 drawn again" in printed
    saved = tomllib.loads((project / tool.RESULTS).read_text())
    outcomes = {(row["outcome"], row["after"], row.get("by"), row.get("reason")) for row in saved["mutants"]}
    assert outcomes == {
        ("found", "return (a - b) * 1", "tests/test_a.py::test_total", None),
        ("explained", "return (a + b) * 1 // 1", None, "one is one"),
        ("alive", "return (a + b) * (1)", None, None),
    }
    assert (project / "ktmoe" / "a.py").read_text() == text

    saved["mutants"] = [row | {"outcome": "explained", "reason": "why", "by": ""} for row in saved["mutants"]]
    gone = explained | {"before": "return a + b", "after": "return a - b"}  # its line is no longer there
    (project / tool.RESULTS).write_text(tool.tomli_w.dumps(saved | {"mutants": [*saved["mutants"], gone]}))
    monkeypatch.setattr(tool.Copy, "test", lambda *arguments: pytest.fail("what was done is not done again"))
    assert tool.main(["--only", "ktmoe/a.py", "--count", "3", "--processes", "1", "--resume", "--save"], project) == 0
    assert tomllib.loads((project / tool.RESULTS).read_text())["mutants"] == [
        {name: value for name, value in row.items() if value} for row in saved["mutants"]
    ]


def test_a_test_that_fails_anyway_finds_nothing(tool, project, capsys):
    (project / "tests" / "test_a.py").write_text("def test_total():\n    assert False\n")
    assert tool.main(["--only", "ktmoe/a.py", "--count", "1", "--processes", "1"], project) == 1
    printed = capsys.readouterr().out
    assert "these tests fail without a mistake, too:\n  tests/test_a.py::test_total" in printed


def test_an_endless_loop_is_found(tool, project, capsys, monkeypatch):
    monkeypatch.setattr(importlib.import_module("mutant_copy"), "CPU_SECONDS", 1)
    text = (project / "ktmoe" / "a.py").read_text()
    at = text.index("return")
    endless = tool.mutations.Mutation("ktmoe/a.py", "deleted", at, at, "while True: pass\n    ")
    monkeypatch.setattr(tool.Run, "candidates", lambda self, root, name: [endless])
    assert tool.main(["--only", "ktmoe/a.py", "--count", "1", "--processes", "1"], project) == 0
    assert "1 drawn, 0 found, 0 crashed, 1 timeout" in capsys.readouterr().out


def test_a_file_without_tests(tool, capsys):
    with pytest.raises(SystemExit):
        tool.main(["--only", "ktmoe/torch/linear.py"])
    assert "names no tests for a file ktmoe/torch/linear.py" in capsys.readouterr().err
