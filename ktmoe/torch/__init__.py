"""PyTorch modules of weights that stay packed: MoEExperts, with add_lora() and loras(); DenseLinear, with share_input();
DenseGroupedLinear; DenseEmbedding. Needs torch.

docs/fine-tuning.md says how to use them.
"""

from ktmoe.errors import UnavailableError

try:
    from ktmoe.torch.embedding import DenseEmbedding
    from ktmoe.torch.experts import MoEExperts
    from ktmoe.torch.grouped_linear import DenseGroupedLinear
    from ktmoe.torch.linear import DenseLinear, share_input
    from ktmoe.torch.models import add_lora, loras
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "torch":
        raise
    install = "uv pip install --torch-backend=cpu torch (pip would install its build for CUDA)"
    raise UnavailableError(f"ktmoe.torch needs torch, which is not installed: {install}") from None

__all__ = ["DenseEmbedding", "DenseGroupedLinear", "DenseLinear", "MoEExperts", "add_lora", "loras", "share_input"]
