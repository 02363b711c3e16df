"""Which classes of vLLM ktmoe stands before, and how vLLM is told."""

from __future__ import annotations

from vllm.logger import init_logger
from vllm.model_executor.custom_op import op_registry_oot

from ktmoe.vllm import dense_choice, dense_layers, experts_bf16
from ktmoe.vllm.experts_method import Served


def register() -> None:
    """Tell vLLM, once. A class that another plug-in has replaced stays that plug-in's."""
    base = experts_bf16.FORMAT.method
    taken = op_registry_oot.get(base.__name__)
    if taken is None:
        base.register_oot(experts_bf16.FORMAT.served())
    elif not issubclass(taken, Served):
        init_logger("vllm.ktmoe").warning(
            "ktmoe leaves unquantized experts to another plug-in: %s is %s.%s", base.__name__, taken.__module__, taken.__name__
        )
    if dense_choice.mode() in ("auto", "all"):
        dense_layers.register()
    try:
        from ktmoe.vllm import configs
    except ImportError as error:
        if not (error.name or "").startswith("vllm"):
            raise
        init_logger("vllm.ktmoe").warning("ktmoe leaves quantized layers to this version of vLLM: %s", error)
    else:
        configs.register()
