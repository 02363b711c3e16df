"""Calls that are part of CUDA graphs: what a graph's replays use, for as long as it is there, and what they failed with.

For each call a graph has copies to pinned memory, a host function that queues the call for a native thread and returns, one
that waits for its result, and a copy of that. A replay runs no Python and takes the GIL nowhere. A Capture keeps what one
graph's calls use. The graph holds a user object, whose destructor says that it is gone; the next call of any wrapper then gives
all of it back.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ktmoe._native import core
from ktmoe.batch import checked_mask
from ktmoe.compat.calls import Loaded
from ktmoe.compat.cuda_runtime import Capturing, HostMemory, Runtime
from ktmoe.compat.lock import FinalizerLock
from ktmoe.errors import InputError, UnavailableError
from ktmoe.forks import cached_property

_ALIGNMENT = 256


class CapturingStream(NamedTuple):
    """Where a call is captured. stream: the handle of the stream. current: a context in which torch works on it."""

    runtime: Runtime
    stream: int
    graph: Capturing
    current: Callable[[], AbstractContextManager]


class Shape(NamedTuple):
    """The sizes of a call."""

    tokens: int
    top_k: int
    hidden: int


class PinnedBuffers:
    """A captured call's host memory, as buffers.Buffers has it: arrays, and the tensors that torch copies (..._owner)."""

    def __init__(self, runtime: Runtime, shape: Shape, adopt):
        self._wide = wide = shape.tokens, shape.hidden
        narrow = shape.tokens, shape.top_k
        arrays = {"x": (wide, np.uint16), "ids": (narrow, np.int64), "weights": (narrow, np.float32), "y": (wide, np.uint16)}
        sizes = [np.dtype(dtype).itemsize * size[0] * size[1] for size, dtype in arrays.values()]
        starts = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]).tolist()
        memory = np.asarray(HostMemory(runtime, starts[-1]))
        for start, size, (name, (dimensions, dtype)) in zip(starts, sizes, arrays.items(), strict=False):
            array = memory[start : start + size].view(dtype).reshape(dimensions)
            setattr(self, name, array)
            setattr(self, f"{name}_owner", adopt(array))

    @cached_property
    def late(self) -> np.ndarray:
        """Memory for what deferred experts give, of numpy alone: it never leaves the host."""
        return np.empty(self._wide, np.uint16)


@dataclass
class Lane:
    """Buffers of the calls that are submitted on one stream: a call may have those of an earlier one whose result was captured.

    So in a replay, the memory's next use comes after that result: on one stream, things are in order.
    """

    free: dict[Shape, list[PinnedBuffers]] = field(default_factory=dict)
    late: list[CapturedCall] = field(default_factory=list)  # what they deferred is still to be added


class Capture:
    """One graph's calls. Made while it is captured."""

    def __init__(self, place: CapturingStream):
        self.number = place.graph.number
        self.calls: list[CapturedCall] = []
        self.lanes: dict[int, Lane] = {}
        self.mark = core.GraphMark()
        self.known = place.runtime.has_user_objects and place.graph.graph is not None
        if self.known:
            place.runtime.retain(place.graph.graph, self.mark.hold(), core.drop_function)

    @property
    def gone(self) -> bool:
        """Whether nothing of the graph runs or will. Without user objects, nobody knows: the capture is kept."""
        return self.known and self.mark.dropped and all(call.record.idle for call in self.calls)

    def buffers(self, place: CapturingStream, shape: Shape, adopt) -> PinnedBuffers:
        free = self.lanes.setdefault(place.stream, Lane()).free.setdefault(shape, [])
        return free.pop() if free else PinnedBuffers(place.runtime, shape, adopt)

    def awaited(self, call: CapturedCall) -> None:
        """Note that the copy of a call's result was captured: what comes after it in this stream finds the call's memory free.

        A call that defers keeps its memory until what it deferred was added; if another graph adds that, as long as this one.
        """
        lane = self.lanes[call.request.place.stream]
        done = [other for other in lane.late if other.record is call.record.earlier]
        lane.late = [other for other in lane.late if other.record is not call.record.earlier]
        (lane.late if call.request.defers else done).append(call)
        for other in done:
            lane.free[other.shape].append(other.buffers)


@dataclass(frozen=True)
class Request:
    """What is to be captured, but for the arguments. on_gpu: uint8 [num_experts], read in each replay.

    successor: the layer that adds what is deferred, None if nothing is; urgent_slots: how many slots are not.
    """

    place: CapturingStream
    side: object
    layer: int
    loaded: Loaded
    on_gpu: np.ndarray
    successor: int | None
    urgent_slots: int

    @property
    def name(self) -> str:
        return f"layer {self.layer}"

    @property
    def defers(self) -> bool:
        return self.successor is not None


@dataclass
class CapturedCall:
    """One call; either result() or abandon() comes last. dtype: of x."""

    request: Request
    dtype: object
    capture: Capture
    shape: Shape
    buffers: PinnedBuffers
    record: core.CallRecord

    def result(self, stream):
        """y as the graph will have it, where the arguments were. Raises InputError if the stream is not part of that graph."""
        place = self.request.side.capturing(stream)
        if place is None or place.graph.number != self.capture.number:
            now = "no graph is being captured" if place is None else "another one is being captured"
            raise InputError(
                f"{self.request.name}: submit_forward was captured in a CUDA graph, and sync_forward must be, too; {now}"
            )
        with place.current():
            place.runtime.launch(place.stream, core.await_function, self.record.address)
            y = self.request.side.returned(self.buffers, self.dtype)
        if place.stream == self.request.place.stream:  # what is submitted next there need not wait for a copy in another stream
            self.capture.awaited(self)
        return y

    def abandon(self) -> None:
        """Do nothing: the call's memory is not used again, since nobody waits for the call in the graph."""


class Captures:
    """The captures of the process. lock: held while a call is captured."""

    def __init__(self, lock: FinalizerLock):
        self._lock = lock
        self.after_fork()

    def after_fork(self) -> None:
        self.live: dict[int, Capture] = {}
        #: The call of a model, as deferral.Passes has it, that deferred experts last.
        self.pending: dict[object, CapturedCall] = {}
        self._scratch = np.empty(0, np.uint8)

    def settle(self) -> None:
        """Raise what a replay failed with, once, and give back what was kept for graphs that are gone."""
        if not self.live:
            return
        with self._lock:
            if core.captured_failures() and (failure := self._failure()) is not None:
                try:
                    raise failure
                finally:
                    del failure  # which knows this frame
            for number in [number for number, capture in self.live.items() if capture.gone]:
                capture = self.live.pop(number)
                self.pending = {model: due for model, due in self.pending.items() if due.capture is not capture}
                capture.calls.clear()  # which know their capture
                capture.lanes.clear()

    def _failure(self) -> Exception | None:
        failures = []
        for call in (call for capture in self.live.values() for call in capture.calls):
            try:
                call.record.check(f"{call.request.name}: a call in a CUDA graph failed in a replay, and its result is NaN")
            except Exception as error:
                failures.append(error.with_traceback(None))
        if len(failures) > 1:
            failures[0].add_note(f"calls that failed: {len(failures)}")
        return failures[0] if failures else None

    def submit(self, request: Request, x, ids, weights) -> CapturedCall:
        """Capture a call up to the host function that submits it. x, ids, weights: tensors whose shapes fit."""
        place, side, loaded = request.place, request.side, request.loaded
        packed = loaded.layer.packed
        if not isinstance(packed, core.PackedLayer):
            raise UnavailableError(
                f"{request.name}: backend {loaded.layer.backend!r} computes in Python, which a CUDA graph cannot hold"
            )
        shape = Shape(*ids.shape, loaded.layer.hidden)
        if 0 in shape:
            raise InputError(f"{request.name}: a call in a CUDA graph needs a token and an id, found {list(ids.shape)} ids")
        with self._lock, place.current():
            _start()
            capture = self.live.get(place.graph.number)
            if capture is None:
                capture = self.live[place.graph.number] = Capture(place)
            buffers = capture.buffers(place, shape, side.adopted)
            record = core.CallRecord(
                packed,
                buffers.x,
                buffers.ids,
                buffers.weights,
                buffers.y,
                np.ascontiguousarray(checked_mask(loaded.layer.spec, loaded.layer.expert_mask)).view(np.uint8),
                request.on_gpu,
                max(request.urgent_slots, 0) if request.defers else None,
                buffers.late if request.defers else None,
                self._take(loaded.model, request.layer, shape),
                self._scratch_for(*shape, loaded.layer.num_experts),
            )
            call = CapturedCall(request, x.dtype, capture, shape, buffers, record)
            capture.calls.append(call)
            side.copy(buffers, x, ids, weights)
            place.runtime.launch(place.stream, core.submit_function, record.address)
            if request.defers:
                self.pending[loaded.model] = call
            return call

    def _scratch_for(self, *sizes: int) -> np.ndarray:
        """Scratch memory for a call. One thread runs the calls of all graphs, so that they share it."""
        needed = core.CallRecord.scratch_bytes(*sizes)
        if needed > self._scratch.size:
            self._scratch = np.empty(needed, np.uint8)
        return self._scratch

    def _take(self, model, layer: int, shape: Shape) -> core.CallRecord | None:
        """The call whose deferred experts this layer adds, as deferral.Passes.take()."""
        call = self.pending.pop(model, None)
        return call.record if call is not None and (call.request.successor, call.shape) == (layer, shape) else None

    def forget(self, model=None) -> None:
        """Let no later call add what a model's calls deferred; None: any model's."""
        with self._lock:
            self.pending = {} if model is None else {other: due for other, due in self.pending.items() if other != model}


def _start() -> None:
    core.start_captured_calls()
    _at_exit()


@functools.cache
def _at_exit() -> None:
    """Replays may still be under way when the interpreter ends."""
    atexit.register(core.close_captured_calls)
