"""OneLayer: a checkpoint of which only one layer's experts are seen. Layers of a checkpoint may be quantized differently."""

from __future__ import annotations

from collections.abc import KeysView

from ktmoe.forks import cached_property
from ktmoe.loaders import naming
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.tensor_file import TensorInfo


class OneLayer:
    """What Loader.detect() looks at, of one layer: names, headers, config and path. It shares the checkpoint's files."""

    def __init__(self, checkpoint: Checkpoint, layer: int | str):
        self.path, self.config = checkpoint.path, checkpoint.config
        self._checkpoint, self._layer = checkpoint, layer
        naming.share(checkpoint, layer, self)

    @cached_property
    def _names(self) -> dict[str, None]:
        return dict.fromkeys(naming.tensors(self._checkpoint, self._layer))

    def names(self) -> KeysView[str]:
        return self._names.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def info(self, name: str) -> TensorInfo:
        """Raises MissingTensorError for a tensor that the checkpoint has not."""
        return self._checkpoint.info(name)
