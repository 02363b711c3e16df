"""tools/test_machines.py: what it runs, and that it is no failure where there can be no machines."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from environments import ROOT

from bench import namespaces


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("machines_tool", ROOT / "tools" / "test_machines.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_machines(tool, monkeypatch, capsys):
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(tool.test_engines, "run", lambda engine, arguments: pytest.fail("nothing can run"))
    assert tool.main([]) == 0
    assert capsys.readouterr().out == "ktmoe: nothing was tested on several machines: network namespaces need root\n"


def test_what_runs_where(tool, monkeypatch):
    class Machines:
        def __init__(self, *arguments):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    ran = []
    monkeypatch.setattr(tool, "Machines", Machines)
    monkeypatch.setattr(tool.test_engines, "run", lambda engine, arguments: ran.append((engine, arguments)) or 7)
    assert tool.main(["-k", "this"]) == 7
    where = [(engine.environment.name, engine.package, engine.tests) for engine, _ in ran]
    assert where == [
        ("engines", "transformers", "tests/engines/test_distributed_machines.py"),
        ("vllm", "vllm", "tests/machines"),
    ]
    assert all(arguments == ["-k", "this"] for _, arguments in ran)
    assert (ROOT / ran[0][0].tests).exists()
    assert list((ROOT / ran[1][0].tests).glob("test_*.py"))
