"""test_writers.py [pytest's arguments]: tests the loaders on what other projects' writers write, and first installs these.

Ends well where a writer cannot be installed, and says which: the tests that need it are skipped.
"""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.peers import environments  # noqa: E402
from bench.peers.environments import ENGINES, TORCH, Environment, SetUpError  # noqa: E402
from bench.peers.peers import LLAMA  # noqa: E402

WRITERS = (
    TORCH,
    Environment("compressed-tensors", "compressed-tensors", (("compressed-tensors==0.20.0",),), base=TORCH),
    Environment("modelopt", "ModelOpt", (("nvidia-modelopt==0.47.0",),), base=TORCH),
    # alone, since it would bring triton
    Environment("autoawq", "AutoAWQ", (("--no-deps", "autoawq==0.2.9"),), base=TORCH),
    Environment("quark", "Quark", (("amd-quark==0.13",),), base=TORCH),
    Environment("torchao", "torchao", (("--no-deps", "torchao==0.18.0"),), base=TORCH),
    Environment("gptqmodel", "GPTQModel", (("gptqmodel==7.6.0",),), base=TORCH),
    # llama.cpp's sources, with the converter to GGUF: the wheel is told to take them and to compile nothing. Neither may pip
    # keep it for the environment that compiles
    Environment(
        "llama-converter",
        "llama.cpp's converter",
        (
            ("sentencepiece==0.2.2",),
            (
                *("--no-deps", "--no-cache-dir", "--no-compile"),
                *("-C", "wheel.cmake=false", "-C", "wheel.packages=vendor/llama.cpp"),
                "llama-cpp-python==0.3.36",
            ),
        ),
        base=TORCH,
    ),
    LLAMA,
    ENGINES,
)


def main(arguments: list[str]) -> int:
    present = 0
    for writer in WRITERS:
        try:
            environments.python(writer, say)
        except SetUpError as error:
            say(f"{writer.title} is left out: {error}")
        else:
            present += 1
    say(f"{present} of {len(WRITERS)} environments of writers are there")
    if not present:
        return 0
    os.environ["KTMOE_TEST_WRITERS"] = str(environments.FOLDER)
    os.chdir(ROOT)
    return pytest.main(["-q", "--exhaustive", "tests/writers", *arguments])


def say(text: str) -> None:
    print(f"ktmoe: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
