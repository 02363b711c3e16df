"""Models of Hugging Face transformers whose routed experts ktmoe computes: load(), Config and pack(). Needs torch.

place() puts some of them on a GPU, count_experts() says which are worth it.

Importing it registers "ktmoe" with transformers, as an implementation of experts and as a quantization method. Nothing else of
transformers or torch is changed.
"""

from ktmoe.errors import UnavailableError
from ktmoe.messages import install

try:
    import torch  # noqa: F401 - named first where all of it is missing, since no package brings the right build of it

    from ktmoe.transformers.config import Config
    from ktmoe.transformers.counting import count_experts
    from ktmoe.transformers.loading import load, pack
    from ktmoe.transformers.place import place
    from ktmoe.transformers.tokenizer import load_tokenizer
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    installs = {
        "torch": "uv pip install --torch-backend=cpu torch accelerate (pip would install its build for CUDA)",
        "transformers": install("transformers"),
    }
    if missing not in installs:
        raise
    raise UnavailableError(f"ktmoe.transformers needs {missing}, which is not installed: {installs[missing]}") from None
except ImportError as error:
    if not (error.name or "").startswith("transformers"):
        raise
    raise UnavailableError(f"ktmoe.transformers needs transformers 5.23 or newer: {error}") from error

__all__ = ["Config", "count_experts", "load", "load_tokenizer", "pack", "place"]
