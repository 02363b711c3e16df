"""Registry[T]: named plugins of one kind, built in or found through entry points, loaded when first asked for."""

from __future__ import annotations

import importlib
import pkgutil
import threading
import warnings
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from ktmoe import forks
from ktmoe.errors import InputError, UnknownNameError
from ktmoe.messages import show

T = TypeVar("T")


class Registry(Generic[T]):
    """Plugins of one kind by name.

    kind: what messages call one ("backend"). package: every module in it registers its own plugin with its last line;
    so does, under its entry point's name, every installed distribution with entry points in `group`.
    A built-in wins over an entry point of the same name. A plugin that cannot be loaded warns and is left out.
    base: the class that plugins inherit from, as "module:name", since its module may import the registry; any by default.

    Examples:
        >>> names = ktmoe.loaders.registry.names()
        >>> "deepseek_v4" in names, ktmoe.backends.registry.get("avx2").modes[0]
        (True, 'int16')
    """

    def __init__(self, kind: str, package: str, group: str, base: str = "builtins:object"):
        self._kind = kind
        self._package = package
        self._group = group
        self._base = base
        self._plugins: dict[str, T] = {}
        self._loaded = self._loading = False
        self.after_fork()
        forks.watch(self)

    def after_fork(self) -> None:
        self._lock = threading.RLock()

    def register(self, name: str, plugin: T, *, overwrite: bool = False) -> None:
        """Add a plugin. Raises ValueError if the name is taken, unless overwrite; InputError for what is no instance of the
        base.

        Examples:
            >>> ktmoe.backends.register("mine", ktmoe.backends.get("avx2"))
            >>> "mine" in ktmoe.backends.names()
            True
            >>> ktmoe.backends.unregister("mine")
        """
        self._load()  # the built-ins take their names first; while they do, this does nothing
        plugin = self._checked(name, plugin)
        with self._lock:
            if name in self._plugins and not overwrite:
                raise ValueError(f"{self._kind} {name!r} is already registered; pass overwrite=True to replace it")
            self._plugins[name] = plugin

    def unregister(self, name: str) -> None:
        """Take a plugin out. Raises UnknownNameError if there is none of that name.

        Examples:
            >>> ktmoe.loaders.register("mine", ktmoe.loaders.get("fp8"))
            >>> ktmoe.loaders.unregister("mine")
        """
        self._load()
        with self._lock:
            self.get(name)
            del self._plugins[name]

    def get(self, name: str) -> T:
        """The plugin of that name. Raises UnknownNameError, which lists the known names.

        Examples:
            >>> ktmoe.backends.get("avx2").rank > 0
            True
        """
        self._load()
        try:
            return self._plugins[name]
        except KeyError:
            raise UnknownNameError(f"unknown {self._kind} {name!r}; known are {', '.join(self.names())}") from None

    def names(self) -> list[str]:
        """All names, sorted.

        Examples:
            >>> "avx2" in ktmoe.backends.names()
            True
        """
        self._load()
        return sorted(self._plugins)

    def values(self) -> list[T]:
        """All plugins, in the order of their names.

        Examples:
            >>> len(ktmoe.backends.registry.values()) == len(ktmoe.backends.names())
            True
        """
        self._load()
        plugins = self._plugins.copy()  # at once: another thread may take one out
        return [plugins[name] for name in sorted(plugins)]

    def _checked(self, name: str, plugin: Any) -> T:
        module, _, base = self._base.partition(":")
        if not isinstance(plugin, getattr(importlib.import_module(module), base)):
            inherits = self._base.replace(":", ".")
            raise InputError(
                f"{self._kind} {name!r} must be an instance of a class that inherits {inherits}, found {show(plugin)}"
            )
        return plugin

    def _load(self) -> None:
        if self._loaded:
            return
        with forks.importing, self._lock:
            if self._loaded or self._loading:
                return
            self._loading = True
            try:
                package = importlib.import_module(self._package)
                for module in pkgutil.iter_modules(package.__path__):
                    importlib.import_module(f"{self._package}.{module.name}")
                self._load_entry_points()
                self._loaded = True
            finally:
                self._loading = False

    def _load_entry_points(self) -> None:
        for entry_point in entry_points(group=self._group):
            if entry_point.name in self._plugins:
                continue
            try:
                self._plugins[entry_point.name] = self._checked(entry_point.name, entry_point.load())
            except Exception as error:  # a broken plugin must not take the others down
                warnings.warn(
                    f"{self._kind} {entry_point.name!r} ({entry_point.value}) was left out: {type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=4,
                )
