"""The CPUs that ktmoe uses where OpenMP has bound the first thread to one of them, as it does in vLLM's processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: torch loads OpenMP; its first product starts the threads.
CODE = """
import os, torch
torch.ones(300, 300) @ torch.ones(300, 300)
from ktmoe.machine import numa
from ktmoe.vllm import cpus
before = os.sched_getaffinity(0)
cpus.share()
print(sorted(before), sorted(numa.usable_cpus()))
"""


def run(**variables: str) -> str:
    """(where the first thread may run before, which CPUs ktmoe uses after)"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_threads_bound_to_a_cpu_each():
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    first, second = cpus[:2]
    assert run(OMP_NUM_THREADS="2", GOMP_CPU_AFFINITY=f"{first} {second}") == f"[{first}] [{first}, {second}]"


def test_no_cpu_that_the_threads_have_not():
    """Others may be another process's: vLLM has one on each NUMA node."""
    first = min(os.sched_getaffinity(0))
    assert run(OMP_NUM_THREADS="1", GOMP_CPU_AFFINITY=f"{first}") == f"[{first}] [{first}]"


def test_nothing_is_bound():
    cpus = sorted(os.sched_getaffinity(0))
    assert run() == f"{cpus} {cpus}"
