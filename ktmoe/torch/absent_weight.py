"""A torch.nn.Linear without a weight: what torch, transformers and peft see of a matrix that is packed."""

from __future__ import annotations

from typing import Any

import torch

from ktmoe.errors import UnavailableError


class AbsentWeight:
    """What a LinearWithoutWeight has as its weight. Libraries may read shape, dtype, device and requires_grad; all else raises
    AttributeError, or TypeError where a function of torch is given it, with a text that says why.
    """

    __slots__ = ("_of", "shape")
    _of: str
    shape: torch.Size
    dtype, device, requires_grad = torch.bfloat16, torch.device("cpu"), False
    _is_hf_initialized = True  # transformers initializes nothing that has this mark

    def __init__(self, of: str, shape: tuple[int, int]):
        object.__setattr__(self, "_of", of)
        object.__setattr__(self, "shape", torch.Size(shape))

    def __getattr__(self, name: str) -> None:
        raise AttributeError(f"{self._why()}: expected no use of its {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{self._why()}: expected nothing to set its {name!r}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> None:
        weight = next((value for value in (*arguments, *(keywords or {}).values()) if isinstance(value, cls)), None)
        raise TypeError(f"{weight._why() if weight else cls.__name__}: torch's {function.__name__} cannot take it")

    def __repr__(self) -> str:
        return f"AbsentWeight({self._of!r}, {list(self.shape)})"

    def _why(self) -> str:
        return f"{self._of}: its weight is packed and is no tensor; ktmoe.Linear.export() gives the matrix"


class LinearWithoutWeight(torch.nn.Linear):
    """A torch.nn.Linear that has no parameter at all. Its weight is an AbsentWeight, its bias None.

    name: of the matrix, for messages.
    """

    def __init__(self, name: str, in_features: int, out_features: int):
        torch.nn.Module.__init__(self)  # torch.nn.Linear's own would allocate a weight
        self.name, self.in_features, self.out_features = name, in_features, out_features
        self.register_parameter("bias", None)
        self._is_hf_initialized = True  # as AbsentWeight has it

    @property
    def weight(self) -> AbsentWeight:
        # Not an AttributeError: peft reads the weight of every torch.nn.Linear.
        return AbsentWeight(self.name, (self.out_features, self.in_features))

    @weight.setter
    def weight(self, value: Any) -> None:
        self.register_parameter("weight", value)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if name == "weight" or param is not None:
            raise UnavailableError(
                f"{self.name}: it cannot be given a {name}: the matrix is packed; ktmoe.Linear.replace() puts another one there"
            )
        super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Nothing: there are none."""
