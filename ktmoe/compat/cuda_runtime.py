"""The CUDA runtime that torch has loaded, as far as capturing needs it. It is looked for when the first graph is captured.

Signatures are those of CUDA's runtime API reference, versions 11 to 13. ktmoe is built without CUDA's headers and libraries.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import NamedTuple

from ktmoe.errors import OutOfMemoryError, UnavailableError

_NEEDED = (
    "cudaLaunchHostFunc",
    "cudaThreadExchangeStreamCaptureMode",
    "cudaHostAlloc",
    "cudaFreeHost",
    "cudaGetLastError",
    "cudaGetErrorString",
    "cudaRuntimeGetVersion",
)
_USER_OBJECTS = ("cudaUserObjectCreate", "cudaUserObjectRelease", "cudaGraphRetainUserObject")

_NAME = re.compile(r"libcudart(-[0-9a-f]+)?\.so")  # some wheels have a copy whose name has a number

_OUT_OF_MEMORY = 2
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_ACTIVE = 1  # cudaStreamCaptureStatusActive
_PORTABLE = 1  # cudaHostAllocPortable: pinned for every GPU
_NO_DESTRUCTOR_SYNC = 1  # cudaUserObjectNoDestructorSync, the only kind there is
_MOVE = 1  # cudaGraphUserObjectMove


class Capturing(NamedTuple):
    """A capture sequence. number: no other one of the process has it. graph: a handle, None where the runtime does not say."""

    number: int
    graph: int | None


class HostMemory:
    """Pinned memory, uint8 [nbytes], for numpy.asarray(). It is given back after the last array of it."""

    def __init__(self, runtime: Runtime, nbytes: int):
        address = c_void_p()
        with runtime.relaxed():
            runtime.call("cudaHostAlloc", byref(address), c_size_t(nbytes), c_uint(_PORTABLE))
        self.__array_interface__ = {"data": (address.value, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        weakref.finalize(self, _free, runtime, address.value, os.getpid()).atexit = False


def _free(runtime: Runtime, address: int, process: int) -> None:
    if process == os.getpid():  # CUDA cannot be used in a forked child
        with suppress(UnavailableError), runtime.relaxed():  # it fails when the driver ends before
            runtime.call("cudaFreeHost", c_void_p(address))


class Runtime:
    """path: of the library, which is loaded. Raises UnavailableError, which names what is missing."""

    def __init__(self, path: str):
        self.path = path
        self._library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        for name in _NEEDED:
            self._require(name)
        self._capture_info, self._capture_outputs = self._find_capture_info()
        self.has_user_objects = self._capture_outputs > 0 and all(hasattr(self._library, name) for name in _USER_OBJECTS)

    def _require(self, name: str) -> None:
        if not hasattr(self._library, name):
            raise UnavailableError(f"CUDA graphs: {self.path} has no {name}; ktmoe needs the runtime of CUDA 11 or later")

    def _find_capture_info(self) -> tuple[str, int]:
        """The function's name, and how many places for results it takes after the capture's number."""
        if hasattr(self._library, "cudaStreamGetCaptureInfo_v3"):  # from CUDA 12.3 on, not in 13
            return "cudaStreamGetCaptureInfo_v3", 4
        if hasattr(self._library, "cudaStreamGetCaptureInfo_v2"):  # from 11.3 on, not in 13
            return "cudaStreamGetCaptureInfo_v2", 3
        self._require("cudaStreamGetCaptureInfo")
        version = c_int()
        self.call("cudaRuntimeGetVersion", byref(version))
        return "cudaStreamGetCaptureInfo", 4 if version.value >= 13000 else 0

    def call(self, name: str, *arguments) -> None:
        """Call a function of the runtime. Raises UnavailableError, with the runtime's own words; OutOfMemoryError."""
        error = getattr(self._library, name)(*arguments)
        if error:
            self._library.cudaGetLastError()  # torch would take it for one of its own
            words = self._library.cudaGetErrorString(c_int(error)).decode(errors="replace")
            kind = OutOfMemoryError if error == _OUT_OF_MEMORY else UnavailableError
            raise kind(f"CUDA graphs: {name} failed: {words} (error {error})")

    def capturing(self, stream: int) -> Capturing | None:
        """The capture that the stream with this handle is part of, or None."""
        status, number, graph = c_int(), c_ulonglong(), c_void_p()
        places = (
            graph,
            c_void_p(),
            *([c_void_p()] if self._capture_outputs == 4 else []),
            c_size_t(),
        )  # nodes, edges, how many
        more = [byref(place) for place in places[: self._capture_outputs]]
        self.call(self._capture_info, c_void_p(stream), byref(status), byref(number), *more)
        if status.value != _ACTIVE:
            return None
        return Capturing(number.value, graph.value if more else None)

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Let this thread do what would break a capture of any thread: it has nothing to do with the graph."""
        mode = c_int(_RELAXED)
        self.call("cudaThreadExchangeStreamCaptureMode", byref(mode))
        try:
            yield
        finally:
            self.call("cudaThreadExchangeStreamCaptureMode", byref(mode))

    def launch(self, stream: int, function: int, argument: int) -> None:
        """Put a host function into the stream."""
        self.call("cudaLaunchHostFunc", c_void_p(stream), c_void_p(function), c_void_p(argument))

    def retain(self, graph: int, argument: int, destructor: int) -> None:
        """Have the destructor called once the graph and what was instantiated from it are gone."""
        thing = c_void_p()
        with self.relaxed():
            create = byref(thing), c_void_p(argument), c_void_p(destructor), c_uint(1), c_uint(_NO_DESTRUCTOR_SYNC)
            self.call("cudaUserObjectCreate", *create)
            try:
                self.call("cudaGraphRetainUserObject", c_void_p(graph), thing, c_uint(1), c_uint(_MOVE))
            except BaseException:
                self.call("cudaUserObjectRelease", thing, c_uint(1))
                raise


def loaded() -> list[str]:
    """Paths of the CUDA runtimes that this process has loaded."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths = (line.rstrip("\n").split(maxsplit=5)[5:] for line in maps)
        found = dict.fromkeys(path[0] for path in paths if path and _NAME.match(os.path.basename(path[0])))
    return list(found)


def find() -> Runtime:
    """The CUDA runtime that torch uses. Raises UnavailableError where none is loaded."""
    paths = loaded()
    if len(paths) > 1:  # another package brought one of its own
        version = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None) or ""
        own = f".so.{version.partition('.')[0]}"
        paths = [path for path in paths if own in os.path.basename(path)] or paths
    if not paths:
        raise UnavailableError(
            "CUDA graphs: this process has not loaded CUDA's runtime, libcudart.so, which ktmoe needs to capture one; "
            "run these layers outside of graphs (SGLang: --disable-cuda-graph)"
        )
    return opened(paths[0])


@functools.cache
def opened(path: str) -> Runtime:
    return Runtime(path)
