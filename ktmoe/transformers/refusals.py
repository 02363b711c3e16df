"""Errors of transformers that are for people: in one line, as ktmoe's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ktmoe.errors import KtmoeError, UnavailableError


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """Raise UnavailableError in the place of what transformers raises where it cannot load `what`."""
    try:
        yield
    except KtmoeError:
        raise
    except (ValueError, OSError, ImportError) as error:
        raise UnavailableError(f"transformers cannot load {what}: {' '.join(str(error).split())}") from error
