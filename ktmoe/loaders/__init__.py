"""Loaders: one file per naming of a checkpoint's tensors. `ktmoe.loaders.register(name, loader)` adds one at run time."""

from typing import Any

from ktmoe.registry import Registry

__all__ = ["get", "names", "register", "registry", "unregister"]

registry: Registry[Any] = Registry("loader", __name__, "ktmoe.loaders", "ktmoe.loaders.base:Loader")
register = registry.register
unregister = registry.unregister
get = registry.get
names = registry.names
