"""avx2_guest.py [a command of the shell]: runs it, or the tests of vLLM's plug-in, in a QEMU guest without AVX-512.

First installs QEMU and fetches a kernel. Ends well, and says why nothing ran, where they cannot be had.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.peers import environments  # noqa: E402
from tools import guest  # noqa: E402


def main(arguments: list[str]) -> int:
    def work() -> int:
        command = " ".join(arguments) or tests()
        guest.install()
        return guest.run(command)

    return guest.attempt(work, environments.SetUpError)


def tests() -> str:
    """The command that runs those that depend on the instruction set. All others would take an emulator many hours."""
    python = environments.python(environments.VLLM, lambda text: print(f"ktmoe: {text}", flush=True))
    # as tools/test_engines.py has them, but hours for each of the tests' processes
    variables = f"PYTHONPATH={ROOT} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 KTMOE_TEST_PATIENCE=7200"
    pytest = f"{variables} {python} -m pytest -q -p no:cacheprovider --exhaustive"
    quantized = "tests/vllm/test_quantized_layers.py tests/vllm/test_whole_models.py"
    return f"{pytest} {quantized} && KTMOE_VLLM_DENSE=all {pytest} tests/vllm/test_models.py::test_text"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
