"""How processes end in the middle of anything: by returning, by an exception, by a signal, with work queued, with threads that
go on. The exit status is as it should be, nothing else is on stderr, and none hangs. endings.py has what they do."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import SCHEMES, write

HERE = Path(__file__).parent
DOING = ("load", "pack", "forward", "submit", "model", "convert", "round", "train", "replace", "threads", "replay")
QUEUED = ("submit", "replay", "model", "cycle")
SIGNALS = {"SIGTERM": -15, "SIGINT": -2, "SIGHUP": -1, "SIGKILL": -9}
#: By the way to end: the exit status.
ENDS = {"return": 0, "exit": 3, "at_once": 4, "raise": 1, "exit_in_a_thread": 0, "atexit": 0} | SIGNALS
#: What stderr has, by the way to end; nothing for others. A second traceback, or what an interpreter ignored, is no part of it.
SAID = {
    "raise": r"Traceback \(most recent call last\):\n(  .*\n|\n)+ZeroDivisionError: on purpose\n",
    "SIGINT": r"Traceback \(most recent call last\):\n(  .*\n|\n)+KeyboardInterrupt\n",
    "atexit": "late\n",
}
ALL = [
    *({"doing": doing, "where": "main", "how": how} for doing in DOING for how in SIGNALS),
    *({"doing": doing, "where": where, "how": how} for doing in DOING for where in ("thread", "daemon") for how in ENDS),
    *({"doing": doing, "where": "queued", "how": how} for doing in QUEUED for how in ENDS),
]
#: How many processes one process forks, by the option that chooses tests.
FORKED = {"soak": 40, None: 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    scheme, tensors, folder = SCHEMES["bf16"], {}, tmp_path_factory.mktemp("model")
    for number in range(3):
        tensors |= scheme.layer(f"model.layers.{number}", seed=number)
    write(folder, tensors, {"num_experts": 3, "hidden_act": "silu", "model_type": "qwen3_moe"}).close()
    return folder


def ended(folder, cases):
    """[(whether it hung, its status, what it said)]."""
    command = [sys.executable, HERE / "endings.py", folder, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_ends(repeat, folder):
    order, count = random.Random(1).sample(ALL, len(ALL)), FORKED.get(repeat.how, 10)
    for number in repeat(f"{count} processes that end while something goes on", 80):
        chosen = random.Random(number)
        cases = [order[(number * count + i) % len(order)] | {"after": chosen.uniform(0, 0.02)} for i in range(count)]
        for case, (hung, status, said) in zip(cases, ended(folder, cases), strict=True):
            assert (hung, status) == (None, ENDS[case["how"]]), (case, said)
            assert re.fullmatch(SAID.get(case["how"], ""), said), (case, said)
