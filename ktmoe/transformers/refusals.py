"""Errors of transformers that are for people: in one line, as ktmoe's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ktmoe.errors import KtmoeError, UnavailableError, memory_for


@contextmanager
def in_one_line(what: str, verb: str = "load") -> Iterator[None]:
    """Raise UnavailableError in the place of whatever transformers raises. The message: it cannot `verb` `what`.

    A damaged config.json leads to errors of any type. MemoryError becomes OutOfMemoryError. Errors of ktmoe, of a stdout that
    nobody reads, and of wrong usage of transformers' commands stay as they are.
    """
    try:
        with memory_for(what):
            yield
    except (KtmoeError, BrokenPipeError, typer.Exit, typer.TyperException):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
        raise UnavailableError(f"transformers cannot {verb} {what}: {reason}") from error
