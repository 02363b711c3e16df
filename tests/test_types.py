"""What mypy --strict says to users of the package as it is installed: nothing to right ones, and what is wrong to others."""

import re
import shutil
import site
import subprocess
import sys

import pytest
from environments import ROOT, Environment

pytest.importorskip("mypy", reason="mypy is not installed")

#: A wrong line: what mypy says of it.
WRONG = {
    'ktmoe.MoELayer.from_checkpoint(3, "3")': 'Argument 1 to "from_checkpoint" of "MoELayer" has incompatible type "int"',
    'ktmoe.MoELayer.from_checkpoint("a", [3])': 'Argument 2 to "from_checkpoint" of "MoELayer" has incompatible type "list',
    'ktmoe.MoELayer.from_checkpoint("a", 3, rank=1)': 'Unexpected keyword argument "rank"',
    'ktmoe.MoELayer("a")': 'Argument 1 to "MoELayer" has incompatible type "str"',
    'layer.forward("x", ids, ids)': 'Value of type variable "A" of "forward" of "MoELayer" cannot be "str"',
    "layer.forward(x, ids)": 'Missing positional argument "expert_weights"',
    "text: str = layer.forward(x, ids, x)": 'expression has type "ndarray',
    "layer.submit(x, ids, x).result().no_such": 'has no attribute "no_such"',
    "layer.no_such": '"MoELayer" has no attribute "no_such"',
    'layer.replace_expert("0", {})': 'Argument 1 to "replace_expert" of "MoELayer" has incompatible type "str"',
    'ktmoe.set_num_threads("2")': 'Argument 1 to "set_num_threads" has incompatible type "str"',
    "ktmoe.Linear(x)": 'Argument 1 to "Linear" has incompatible type "ndarray',
    'ktmoe.Scale("fp32", 32)': 'Argument 2 to "Scale" has incompatible type "int"',
    'ktmoe.backends.register("a", 3)': 'Argument 2 has incompatible type "int"; expected "Backend"',
    "ktmoe.quantize(layer, 'mxfp4')": 'Argument 1 to "quantize" has incompatible type "MoELayer"',
    "ktmoe.no_such": 'Module has no attribute "no_such"',
}
BEFORE = """\
import numpy as np
from numpy.typing import NDArray

import ktmoe


def wrong(layer: ktmoe.MoELayer, x: NDArray[np.float32], ids: NDArray[np.int64]) -> None:
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """{file: {line: what mypy says}}, of a file without faults and of one with nothing else.

    The package stands where pip puts it: there mypy reads it because of py.typed alone.
    """
    environment = Environment(tmp_path_factory.mktemp("environment"))
    (environment.site / "ktmoe").symlink_to(ROOT / "ktmoe")
    (environment.site / "others.pth").write_text("\n".join(site.getsitepackages()))
    folder = tmp_path_factory.mktemp("program")
    shutil.copy(ROOT / "tests" / "uses.py", folder)
    (folder / "wrong.py").write_text(BEFORE + "".join(f"    {line}\n" for line in WRONG))
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--python-executable", environment.python]
    done = subprocess.run([*command, "uses.py", "wrong.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert not done.stderr
    found = {}
    for name, line, text in re.findall(r"^(.*?):(\d+): error: (.*)$", done.stdout, re.MULTILINE):
        found.setdefault(name, {}).setdefault(int(line), []).append(text)
    assert found or done.returncode == 0, done.stdout
    return found


def test_right_uses_have_no_errors(said):
    assert said.keys() <= {"uses.py", "wrong.py"}
    assert "uses.py" not in said


def test_wrong_uses_are_errors(said):
    first = BEFORE.count("\n") + 1
    found = {line: " ".join(said["wrong.py"].get(first + i, ["nothing"])) for i, line in enumerate(WRONG)}
    assert {line: text for line, text in found.items() if WRONG[line] not in text} == {}
