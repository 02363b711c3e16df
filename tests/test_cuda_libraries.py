"""NVIDIA's own CUDA runtimes have the functions that CUDA graphs need. Their libraries load without a GPU; pip brings them."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from environments import ROOT

LIBRARIES = {
    "nvidia-cuda-runtime-cu11": "cudaStreamGetCaptureInfo_v2",
    "nvidia-cuda-runtime-cu12": "cudaStreamGetCaptureInfo_v3",
    "nvidia-cuda-runtime>=13,<14": "cudaStreamGetCaptureInfo",
}

LOOK = """
import ctypes, json, sys
from ktmoe.compat import cuda_runtime
from ktmoe.errors import UnavailableError

ctypes.CDLL(sys.argv[1])
runtime = cuda_runtime.find()
try:
    words = repr(runtime.capturing(0))
except UnavailableError as error:  # there is no driver
    words = str(error)
print(json.dumps([runtime.path, runtime.has_user_objects, words]))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_of_nvidia(name, tmp_path):
    """All functions are there; the one that tells of captures is called, and its answer or its error is understood."""
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(tmp_path),
        name,
    ]
    done = subprocess.run(download, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip has no {name} here")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (member for member in archive.namelist() if Path(member).name.startswith("libcudart.so"))
        library = archive.extract(member, tmp_path)
    done = subprocess.run([sys.executable, "-c", LOOK, library], cwd=ROOT, capture_output=True, text=True, check=True)
    path, has_user_objects, words = json.loads(done.stdout)
    assert (path, has_user_objects) == (library, True)
    assert words == "None" or words.startswith(f"CUDA graphs: {LIBRARIES[name]} failed: ")
