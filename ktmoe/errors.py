"""One exception tree: every error ktmoe raises on purpose is a KtmoeError and also the builtin a caller expects."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from ktmoe.messages import printable


class KtmoeError(Exception):
    """Base of every error that ktmoe raises on purpose. Its message can be printed and is not long, whatever file it quotes.

    Examples:
        >>> try:
        ...     layer.forward(x[:, :8], ids, weights)
        ... except ktmoe.errors.KtmoeError as error:
        ...     print(type(error).__name__, isinstance(error, ValueError))
        InputError True
    """

    def __init__(self, *arguments: object):
        super().__init__(*(printable(value) if isinstance(value, str) else value for value in arguments))


class InputError(KtmoeError, ValueError):
    """An argument of a forward call, or of a constructor, has a wrong shape, dtype, layout or value."""


class FormatError(KtmoeError, ValueError):
    """Weights do not match the WeightFormat that is claimed for them, or hold a code that stands for NaN."""


class CheckpointError(KtmoeError, ValueError):
    """A checkpoint's file, header, index or config is malformed, truncated or inconsistent."""


class CacheError(KtmoeError, ValueError):
    """A packed cache is damaged, or of another checkpoint or version, or it was changed while it was used."""


class MissingTensorError(CheckpointError, LookupError):
    """A checkpoint lacks a tensor or a layer that was asked for."""


class UnknownNameError(KtmoeError, LookupError):
    """A registry has no backend or loader of that name."""


class UnavailableError(KtmoeError, RuntimeError):
    """A backend exists but cannot run here: the CPU, the build or the weights' format rules it out."""


class LackingError(UnavailableError):
    """A backend has not what it was asked for. The message is what follows its name, such as "cannot export an expert"."""


class ClosedError(KtmoeError, RuntimeError):
    """A layer or a dense matrix was used after close()."""


class OutOfMemoryError(KtmoeError, MemoryError):
    """The operating system refused memory; nothing was kept of what was being built."""


class RankError(KtmoeError, RuntimeError):
    """Another process of a distributed layer raised an error, is gone, or calls something else."""


class NotCopyableError(KtmoeError, TypeError):
    """A layer, a dense matrix or a model was to be copied or pickled."""


class OutOfSpaceError(KtmoeError, OSError):
    """A disk has too little free space for what is about to be written; nothing was."""


class OutputError(KtmoeError, OSError):
    """A file or a folder cannot be written: it exists, another process writes it, or the disk is full."""


@contextmanager
def asking(backend: str, whose: str) -> Iterator[None]:
    """Within it, a LackingError becomes an UnavailableError that names the backend and whose weights they are."""
    try:
        yield
    except LackingError as error:
        raise UnavailableError(f"{whose}: backend {backend!r} {error}") from None


@contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Raise OutOfMemoryError, which says what the memory was for, in the place of a bare MemoryError."""
    try:
        yield
    except OutOfMemoryError:
        raise
    except MemoryError as error:
        traceback.clear_frames(error.__traceback__)  # else they keep what was allocated before
        raise OutOfMemoryError(f"{what}: the system refused memory{f': {error}' if str(error) else ''}") from error


@contextmanager
def thread_for(what: str) -> Iterator[None]:
    """Raise UnavailableError, which says what a thread was for, in the place of a bare RuntimeError: it cannot be started."""
    try:
        yield
    except RuntimeError as error:
        raise UnavailableError(f"{what}: {error}") from error
