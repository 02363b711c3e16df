"""What the log says: which layers ktmoe computes, and which are left to vLLM and why. One line each, not one a layer."""

from __future__ import annotations

import weakref

from vllm.logger import init_logger

from ktmoe.layer import MoELayer
from ktmoe.messages import show

# vLLM shows what its own loggers say
_logger = init_logger("vllm.ktmoe")


class LoadingReport:
    """Collects the layers of a model until its last one is loaded."""

    def __init__(self):
        self._waiting: weakref.WeakSet = weakref.WeakSet()
        self._served: dict[str, tuple[int, int]] = {}
        self._left: dict[tuple[str, str], list[str]] = {}

    def wait_for(self, method: object) -> None:
        """Note a layer's method that is not loaded yet."""
        self._waiting.add(method)

    def done(self, method: object) -> None:
        """Note that a layer is loaded. After the last one, say()."""
        self._waiting.discard(method)
        if not self._waiting:
            self.say()

    def served(self, method: str, layer: MoELayer) -> None:
        """Note a layer that ktmoe computes. method: the name of vLLM's class."""
        what = f"{method}: {layer.spec.formats['gate'].description}, backend {layer.backend}, activations {layer.activations}"
        count, nbytes = self._served.get(what, (0, 0))
        self._served[what] = count + 1, nbytes + layer.nbytes

    def left(self, method: str, reason: str, layer: str) -> None:
        """Note a layer that is vLLM's own. layer: its name."""
        self._left.setdefault((method, reason), []).append(layer)

    def say(self) -> None:
        """Log what was collected, once."""
        for what, (count, nbytes) in self._served.items():
            _logger.info("ktmoe computes the experts of %s (%s), %.3g GB", _layers(count), what, nbytes / 1e9)
        for (method, reason), names in self._left.items():
            _logger.warning(
                "ktmoe leaves the experts of %s to vLLM (%s): %s: %s", _layers(len(names)), method, reason, show(names)
            )
        self._served.clear()
        self._left.clear()


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count != 1)}"


REPORT = LoadingReport()
