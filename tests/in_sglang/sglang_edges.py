"""The edges of SGLang that are not here: packages that a layer does not need, and a GPU. All else is the wheel's own."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

#: Imported at the top of modules that the layer's own imports reach. PyPI's torchvision is a CUDA build.
PACKAGES = ("IPython", "torchvision")
#: The fork's kernels for a GPU. Upstream asks whether it has its own.
OF_THE_FORK = ("sgl_kernel",)


class _Anything(ModuleType):
    """A module that has every name."""

    __path__ = ()
    __version__ = "0"

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: tuple[str, ...]):
        self._packages = packages

    def find_spec(self, fullname, path, target=None):
        there = fullname.partition(".")[0] in self._packages
        return ModuleSpec(fullname, self, is_package=True) if there else None

    def create_module(self, spec):
        return _Anything(spec.name)

    def exec_module(self, module):
        pass


class _Stream:
    cuda_stream = 0

    def __init__(self, device=None):
        pass

    def wait_stream(self, stream):
        pass

    wait_event = record = wait_stream


def stand_in(fork: bool) -> None:
    """Put stand-ins in the place of modules, for the rest of the process."""
    import torch

    sys.meta_path.append(_Finder(PACKAGES + OF_THE_FORK if fork else PACKAGES))
    nothing = {"synchronize": lambda device=None: None, "current_stream": _Stream, "Stream": _Stream, "Event": _Stream}
    replaced = nothing | {"stream": lambda stream: nullcontext(), "get_device_capability": lambda device=None: (9, 0)}
    vars(torch.cuda).update(replaced if fork else nothing)
    torch.Tensor.record_stream = lambda tensor, stream: None


def metadata(maps):
    """What SGLang says of where experts are: maps, int64 [layers, experts]."""
    return lambda: SimpleNamespace(physical_to_logical_map_cpu=maps)
