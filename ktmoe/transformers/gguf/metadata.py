"""What a GGUF file says of its model, by the keys of its architecture, as numbers that have been checked."""

from __future__ import annotations

import math

import numpy as np

from ktmoe.errors import CheckpointError
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.gguf_model import ARCHITECTURE
from ktmoe.messages import show

#: The most of a count. No model has a size beyond it.
_MOST = 2**31 - 1
#: What stands for "no default": the key must be there.
_NEEDED = object()


class GgufMetadata:
    """Metadata and headers of an open GGUF checkpoint.

    architecture: general.architecture. layers: the model's, without those that predict tokens beyond the next one.
    Keys are given without the architecture's name before them. Each method raises CheckpointError, which names the key, for a
    value of another kind, and for none where there is no default.
    """

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.architecture = str(checkpoint.config.get(ARCHITECTURE))
        blocks, more = self.count("block_count"), self.count("nextn_predict_layers", 0)
        numbers = (name.split(".", 2)[1] for name in checkpoint.names() if name.startswith("blk."))
        stored = 1 + max((int(number) for number in numbers if number.isdecimal() and len(number) < 7), default=-1)
        if more >= blocks:
            raise self._error("nextn_predict_layers", f"a number below block_count, {blocks}", more)
        self.layers = blocks - more
        if self.layers > stored:  # what follows counts up to it
            raise self._error("block_count", f"at most {stored + more}, as tensors are of {stored} layers", blocks)

    def count(self, key: str, default: int | object | None = _NEEDED, least: int = 0, most: int = _MOST) -> int | None:
        """An integer from least to most."""
        found = self._value(key, default)
        if found is not default and (type(found) is not int or not least <= found <= most):
            expected = f"a number, {least} or more" if most == _MOST else f"a number from {least} to {most}"
            raise self._error(key, expected, found)
        return found

    def number(self, key: str, default: float | object | None = _NEEDED, above: float = -math.inf) -> float | None:
        """A finite number above another one, as a float."""
        found = self._value(key, default)
        if found is default:
            return found
        if type(found) not in (int, float) or not math.isfinite(found) or not above < found:
            expected = "a finite number" if above == -math.inf else f"a finite number above {above:g}"
            raise self._error(key, expected, found)
        return _shortest(found)

    def without(self, key: str, *neutral: object) -> None:
        """Refuse a value that changes what is computed. neutral: those that do not, beside none."""
        found = self._value(key, None)
        if found is not None and found not in neutral:
            raise self._error(key, f"none, or {' or '.join(map(str, neutral))}", found)

    def flag(self, key: str, default: bool) -> bool:
        found = self._value(key, default)
        if type(found) is not bool:
            raise self._error(key, "true or false", found)
        return found

    def text(self, key: str, default: str) -> str:
        found = self._value(key, default)
        if not isinstance(found, str):
            raise self._error(key, "a text", found)
        return found

    def flags(self, key: str) -> list[bool] | None:
        """A list with a value for each layer, and perhaps more; None if there is no such key."""
        found = self._value(key, None)
        if found is None:
            return None
        if not isinstance(found, list) or len(found) < self.layers or not all(type(each) is bool for each in found):
            raise self._error(key, f"true or false for each of {self.layers} layers", found)
        return found[: self.layers]

    def rows(self, *names: str, default: int | None = None) -> int:
        """The rows of the first of these tensors that is there. Raises CheckpointError if none is, without a default."""
        for name in names:
            if name in self.checkpoint:
                shape = self.checkpoint.info(name).shape
                return shape[-2] if len(shape) > 1 else 1
        if default is not None:
            return default
        raise CheckpointError(f"{self.checkpoint.path}: expected a tensor {' or '.join(names)}, found none")

    def has(self, ending: str) -> bool:
        """Whether a layer has a tensor of that name, such as "attn_q.bias"."""
        return any(f"blk.{layer}.{ending}" in self.checkpoint for layer in range(self.layers))

    def refuse(self, key: str, expected: str) -> CheckpointError:
        """An error for a value of that key that no model of transformers has."""
        return self._error(key, expected, self._value(key, None))

    def _value(self, key: str, default: object) -> object:
        found = self.checkpoint.config.get(f"{self.architecture}.{key}", default)
        if found is _NEEDED:
            raise self._error(key, "a value", None)
        return found

    def _error(self, key: str, expected: str, found: object) -> CheckpointError:
        found = "none" if found is None else show(found)
        return CheckpointError(f"{self.checkpoint.path}: {self.architecture}.{key}: expected {expected}, found {found}")


def _shortest(number: float) -> float:
    """The decimal number that a float32 stands for: 1e-06 and not 9.999999974752427e-07."""
    short = float(str(np.float32(number)))
    return short if np.float32(number) == number else float(number)
