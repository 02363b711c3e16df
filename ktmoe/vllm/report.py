"""What the log says: one line of what ktmoe computes, and one for each reason why layers are left to vLLM."""

from __future__ import annotations

import weakref

from vllm.logger import init_logger

from ktmoe.layer import MoELayer
from ktmoe.linear import Linear
from ktmoe.messages import show

# vLLM shows what its own loggers say
_logger = init_logger("vllm.ktmoe")
#: Reasons that the log has.
SAID: set[str] = set()


def leaves(what: str, reason: str) -> None:
    """Log that layers are vLLM's, if they are the first for this reason."""
    if reason not in SAID:
        SAID.add(reason)
        _logger.warning("ktmoe leaves %s to vLLM: %s", what, reason)


class LoadingReport:
    """Collects the layers of a model until its last one is loaded."""

    def __init__(self) -> None:
        self._waiting: weakref.WeakSet = weakref.WeakSet()
        self._computed: dict[tuple[str, str], tuple[int, int]] = {}
        self._small = 0
        self._left: dict[tuple[str, str], list[str]] = {}

    def wait_for(self, method: object) -> None:
        """Note a layer's method that is not loaded yet."""
        self._waiting.add(method)

    def done(self, method: object) -> None:
        """Note that a layer is loaded. After the last one, say()."""
        self._waiting.discard(method)
        if not self._waiting:
            self.say()

    def experts(self, method: str, layer: MoELayer) -> None:
        """Note routed experts that ktmoe computes. method: the name of vLLM's class."""
        self._count("experts", f"{method}: {layer.spec.formats['gate'].description}", layer)

    def dense(self, linear: Linear) -> None:
        """Note a dense layer that ktmoe computes."""
        self._count("dense", linear.format.description, linear)

    def _count(self, kind: str, what: str, packed: MoELayer | Linear) -> None:
        what = f"{what}, backend {packed.backend}, activations {packed.activations}"
        count, nbytes = self._computed.get((kind, what), (0, 0))
        self._computed[kind, what] = count + 1, nbytes + packed.nbytes

    def small(self) -> None:
        """Note a dense layer that vLLM computes faster."""
        self._small += 1

    def left(self, method: str, reason: str, layer: str) -> None:
        """Note routed experts that are vLLM's own. layer: their name."""
        self._left.setdefault((method, reason), []).append(layer)

    def failed(self, error: BaseException) -> None:
        """Log what was collected, and in one line why the model is not loaded: vLLM shows several tracebacks."""
        self.say()
        _logger.critical("ktmoe cannot load the model: %s", error)

    def say(self) -> None:
        """Log what was collected, once."""
        parts = []
        for (kind, what), (count, nbytes) in sorted(self._computed.items(), reverse=True):
            layers = f"the experts of {_layers(count)}" if kind == "experts" else _layers(count, "dense ")
            parts.append(f"{layers} ({what}), {nbytes / 1e9:.3g} GB")
        if parts:
            rest = f"; vLLM computes {_layers(self._small, 'small dense ')}" if self._small else ""
            _logger.info("ktmoe computes %s%s", ", and ".join(parts), rest)
        for (method, reason), names in self._left.items():
            _logger.warning(
                "ktmoe leaves the experts of %s to vLLM (%s): %s: %s", _layers(len(names)), method, reason, show(names)
            )
        self._computed.clear()
        self._left.clear()
        self._small = 0


def _layers(count: int, kind: str = "") -> str:
    return f"{count} {kind}layer{'s' * (count != 1)}"


REPORT = LoadingReport()
