"""kt-kernel's own torch layers as a client: they train on ktmoe's KTMoEWrapper as on their own. See client.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from classes import need
from original import INTERPRETER, PATIENCE_SECONDS, needed

from bench.peers import environments

pytestmark = needed
ROOT = Path(__file__).resolve().parents[2]
PARTS = ("plain", "accumulated", "checkpointed, computed again", "checkpointed, kept")
#: The largest difference: both round to bfloat16 at places of their own, see test_sft.py.
MOST = 0.02


@pytest.fixture(scope="module")
def trained(exists, tmp_path_factory):
    """The answers of client.py on either's wrapper."""
    need(exists, "AMXBF16_SFT_MOE")
    folder = tmp_path_factory.mktemp("trained")
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    theirs = Path(INTERPRETER).parents[1] / "lib" / version / "site-packages"
    found = [ROOT, *filter(None, sys.path), environments.packages(environments.TORCH), theirs]
    variables = {"PYTHONPATH": os.pathsep.join(map(str, found))}

    def run(name):
        command = [sys.executable, Path(__file__).with_name("client.py"), name, folder / f"{name}.npz"]
        environment = os.environ | variables
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        with np.load(folder / f"{name}.npz") as file:
            return {key: file[key] for key in file.files}

    return run("ktmoe"), run("kt-kernel")


def apart(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.parametrize("part", PARTS)
def test_kt_kernels_layers(trained, part):
    """Losses, the first step's gradients of the adapter, of a layer before, of the router and of x."""
    ours, theirs = (
        {key.split(": ")[1]: array for key, array in found.items() if key.startswith(f"{part}: ")} for found in trained
    )
    assert set(ours) == set(theirs)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=0.005)
    assert len(set(ours["losses"].tolist())) == len(ours["losses"])
    gradients = [name for name in ours if name.startswith("gradient")]
    assert len(gradients) == 9
    for name in gradients:
        assert apart(ours[name], theirs[name]) < MOST, name
    assert ours["state"] == theirs["state"] == "EMPTY"
    tokens = [
        apart(*pair) for pair in zip(*(found["y"].reshape(-1, found["y"].shape[-1]) for found in (ours, theirs)), strict=True)
    ]
    assert np.median(tokens) < MOST  # a router that is nearly undecided may take another expert in one of them


def test_a_model_that_kt_kernel_wrapped(trained):
    """Losses fall, and alike."""
    ours, theirs = (found["wrapped: losses"] for found in trained)
    assert ours == pytest.approx(theirs, rel=0.01)
    assert (np.diff(ours) < 0).all()


def test_what_is_checkpointed_changes_nothing(trained):
    """On ktmoe's wrapper: the same bits."""
    ours, _ = trained
    for what in {key.split(": ")[1] for key in ours if key.startswith("plain")}:
        plain, *others = (ours[f"{part}: {what}"] for part in PARTS if part != "accumulated")
        for other in others:
            assert np.array_equal(plain, other), what
