"""Which classes of vLLM ktmoe stands before, and how vLLM is told."""

from __future__ import annotations

from vllm.logger import init_logger
from vllm.model_executor.custom_op import op_registry_oot

from ktmoe.vllm import dense_choice, dense_layers, experts_bf16
from ktmoe.vllm.experts_method import Served


def register() -> None:
    """Tell vLLM, once. A class that another plug-in has replaced stays that plug-in's."""
    _stand_before(experts_bf16.FORMAT.method, experts_bf16.FORMAT.served(), Served, "unquantized experts")
    if dense_choice.mode() in ("auto", "all"):
        for base in dense_layers.CLASSES:
            _stand_before(base, dense_layers.replacement(base), dense_layers.DenseLayer, "dense layers")
    try:
        from ktmoe.vllm import configs
    except ImportError as error:
        if not (error.name or "").startswith("vllm"):
            raise
        init_logger("vllm.ktmoe").warning("ktmoe leaves quantized layers to this version of vLLM: %s", error)
    else:
        configs.register()


def _stand_before(base: type, ours: type, mark: type, what: str) -> None:
    """Let vLLM make ours where it would make base. mark: what all of ktmoe's classes of this kind inherit."""
    taken = op_registry_oot.get(base.__name__)
    if taken is None:
        base.register_oot(ours, name=base.__name__)
    elif not issubclass(taken, mark):
        init_logger("vllm.ktmoe").warning(
            "ktmoe leaves %s to another plug-in: %s is %s.%s", what, base.__name__, taken.__module__, taken.__name__
        )
