"""DenseEmbedding: rows of a packed matrix, where a model has a torch.nn.Embedding whose weight is its output layer's, too."""

from __future__ import annotations

from typing import Any

import torch

from ktmoe import arrays
from ktmoe.errors import InputError
from ktmoe.linear import Linear
from ktmoe.torch.linear import copied


class DenseEmbedding(torch.nn.Module):
    """The rows of a ktmoe.Linear by their numbers, frozen. It is called as a torch.nn.Embedding is.

    linear: a Linear, which a deep copy of the module shares: the model's output layer, so that the matrix is in memory once.
    dtype: of what is returned, torch.bfloat16 or torch.float32.

    It has no parameters, and state_dict() is empty; `weight` is an AttributeError. Attributes: linear, dtype.
    num_embeddings, embedding_dim: n and k.

    Raises InputError for anything else.

    Examples:
        >>> rows = DenseEmbedding(linear)(torch.tensor([[3, 1, 3]]))
        >>> rows.dtype, rows.shape == (1, 3, linear.shape[1])
        (torch.bfloat16, True)
    """

    def __init__(self, linear: Linear, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        if not isinstance(linear, Linear):
            found = type(linear)
            raise InputError(f"linear must be a ktmoe.Linear, found {found.__module__}.{found.__qualname__}")
        if dtype not in (torch.bfloat16, torch.float32):
            raise InputError(f"dtype must be torch.bfloat16 or torch.float32, found {dtype}")
        self.linear, self.dtype = linear, dtype
        self.num_embeddings, self.embedding_dim = linear.shape

    @torch.compiler.disable
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[..., embedding_dim] of ids [...], integers in [0, num_embeddings), on the CPU. It has no gradient.

        Raises InputError; ClosedError.
        """
        if not isinstance(ids, torch.Tensor):
            raise InputError(f"ids must be a torch tensor, found {type(ids).__name__}")
        arrays.as_numpy(ids, "ids")  # refuses other devices and layouts before torch does anything with them
        out = torch.empty(*ids.shape, self.embedding_dim, dtype=self.dtype)
        self.linear.rows(ids.reshape(-1), out=out.view(-1, self.embedding_dim))
        return out

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.linear.format.description}"

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"a DenseEmbedding has no weight: {self.linear.name} is packed; linear.rows(ids) gives rows of it, "
                "linear.export() the whole matrix"
            )
        return super().__getattr__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> DenseEmbedding:
        """As any module's, but for the Linear, which copies share."""
        return copied(self, memo, self.linear)
