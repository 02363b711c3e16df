"""Gradients that an optimizer finds where backward writes them: the buffer is Parameter.grad itself, with no copy.

kt-kernel calls them authoritative. A parameter's window is open while its grad is the buffer: backward then adds to it. It is
closed while grad is None: backward then writes it anew. All windows of a layer are open or closed together.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from ktmoe.errors import InputError, UnavailableError
from ktmoe.messages import show

#: What the names of an adapter's entries begin with, as in kt-kernel.
_OF_ADAPTER = "lora."


@dataclass(frozen=True)
class OptimizerGradient:
    """A parameter and its buffer. metadata: the buffer's, which must stay."""

    name: str
    parameter: object
    grad_view: object
    metadata: tuple


class OptimizerGradients:
    """Part of SFTWrapper.

    _uses_authoritative_optimizer_grads: whether there are any, which kt-kernel's torch layers set.
    """

    def __init__(self, shared: bool):
        self._uses_authoritative_optimizer_grads = shared
        self._shared: list[OptimizerGradient] = []
        self._writing: bool | None = None

    @property
    def authoritative_optimizer_grads(self) -> tuple[OptimizerGradient, ...]:
        return tuple(self._shared)

    def register_authoritative_optimizer_grad(self, name: str, parameter, grad_view) -> None:
        """grad_view: the tensor, like parameter, that backward writes. It becomes parameter.grad after each backward.

        Raises InputError; UnavailableError if either is registered already. A method without such gradients does nothing.
        """
        if not self._uses_authoritative_optimizer_grads:
            return
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(parameter, torch.nn.Parameter) or not isinstance(grad_view, torch.Tensor):
            raise InputError(f"{name} must be a torch Parameter and a tensor, found {show(parameter)} and {show(grad_view)}")
        own, other = ((tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in (parameter, grad_view))
        if own != other:
            raise InputError(f"{name}: its gradient must be like it, {own}, found {other}")
        for entry in self._shared:
            if entry.parameter is parameter or entry.grad_view is grad_view:
                raise UnavailableError(f"{name}: it or its gradient is registered already as {entry.name}")
        parameter.grad = None
        self._shared.append(OptimizerGradient(name, parameter, grad_view, _metadata(grad_view)))

    def validate_authoritative_optimizer_grad_state(self) -> str:
        """ "empty", "closed" or "open". Raises UnavailableError if somebody replaced a gradient or its memory."""
        if not self._uses_authoritative_optimizer_grads or not self._shared:
            return "empty"
        found = set()
        for entry in self._shared:
            if _metadata(entry.grad_view) != entry.metadata:
                raise UnavailableError(f"{entry.name}: the memory or the shape of its gradient was changed")
            grad = entry.parameter.grad
            if grad is not None and grad is not entry.grad_view:
                raise UnavailableError(f"{entry.name}: expected grad to be None or the registered tensor, found another one")
            found.add(grad is None)
        if len(found) > 1:
            raise UnavailableError("expected all grads to be None or none of them, found some")
        return "closed" if found.pop() else "open"

    def release_authoritative_optimizer_grads(self) -> None:
        """Let the next backward write anew, after an optimizer's step. The buffers keep what is in them."""
        if not self._uses_authoritative_optimizer_grads:
            return
        if self._writing is not None:
            raise UnavailableError("gradients cannot be released while a backward is pending")
        self.validate_authoritative_optimizer_grad_state()
        self._close_window()

    def _register_adapter(self, pairs: dict[str, tuple[object, object]]) -> None:
        """Register an adapter's {matrix: (parameter, grad_view)}, all or none, in the place of those of an adapter before."""
        if self._writing is not None:
            raise UnavailableError("an adapter cannot be replaced while a backward is pending")
        before = self._shared
        self._shared = [entry for entry in before if not entry.name.startswith(_OF_ADAPTER)]
        try:
            for name, pair in pairs.items():
                self.register_authoritative_optimizer_grad(_OF_ADAPTER + name, *pair)
        except BaseException:
            self._shared = before
            raise

    def _begin_gradients(self) -> bool:
        """Whether the backward that begins adds to the buffers. Either _publish_gradients() or _abort_gradients() follows."""
        if self._writing is not None:
            raise UnavailableError("a backward is pending already: sync_backward() must come first")
        self._writing = self.validate_authoritative_optimizer_grad_state() == "open"
        return self._writing

    def _publish_gradients(self) -> None:
        expected, self._writing = "open" if self._writing else "closed", None
        try:
            found = self.validate_authoritative_optimizer_grad_state()
            if found not in ("empty", expected):
                raise UnavailableError(f"gradients were {found} after a backward that began while they were {expected}")
        except UnavailableError:
            self._close_window()
            raise
        if self._uses_authoritative_optimizer_grads:
            for entry in self._shared:
                entry.parameter.grad = entry.grad_view

    def _abort_gradients(self) -> None:
        """Let the next backward write the buffers anew: they may hold anything."""
        self._writing = None
        self._close_window()

    def _close_window(self) -> None:
        for entry in self._shared:
            entry.parameter.grad = None


def checked_scale(optimizer_grad_scale) -> float:
    """Raises InputError for what is no finite number above 0."""
    try:
        scale = float(optimizer_grad_scale)
    except (TypeError, ValueError):
        scale = math.nan
    if not (math.isfinite(scale) and scale > 0):
        raise InputError(f"optimizer_grad_scale must be finite and above 0, found {show(optimizer_grad_scale)}")
    return scale


def _metadata(tensor) -> tuple:
    place = tensor.device, tensor.data_ptr(), tensor.storage_offset()
    return (*place, tensor.dtype, tensor.layout, tuple(tensor.shape), tuple(tensor.stride()))
