"""Backends: one file per way to compute. `ktmoe.backends.register(name, backend)` adds one at run time."""

from ktmoe.backends.base import Backend, Found
from ktmoe.registry import Registry

__all__ = ["Backend", "Found", "available", "get", "names", "ranked", "register", "registry", "unregister"]

registry: Registry[Backend] = Registry("backend", __name__, "ktmoe.backends", "ktmoe.backends.base:Backend")
register = registry.register
unregister = registry.unregister
get = registry.get
names = registry.names


def ranked() -> list[str]:
    """All names, best first, whether or not they can run here.

    Examples:
        >>> sorted(ktmoe.backends.ranked()) == ktmoe.backends.names()
        True
    """
    return sorted(names(), key=lambda name: -get(name).rank)


def available() -> list[str]:
    """Names of the backends that can run on this CPU, best first.

    Examples:
        >>> layer.backend in ktmoe.backends.available()
        True
    """
    return [name for name in ranked() if isinstance(get(name).lookup(), Found)]
