"""The `ktmoe` command, which the extra `cli` is for: main() runs it. One file a command."""

from __future__ import annotations

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import ktmoe
from ktmoe.errors import KtmoeError
from ktmoe.machine import environment
from ktmoe.messages import install

#: What the extra `cli` installs, by the names of its modules.
EXTRA = {"click", "packaging", "rich", "tomli_w"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status: 0, 1 for an error or a wrong result, 2 for wrong usage, 130 after Ctrl-C."""
    tracebacks = False
    try:
        tracebacks = environment.tracebacks()
        with _warnings_in_one_line():
            status = _run(sys.argv[1:] if arguments is None else list(arguments))
        if sys.stdout:  # there is none after >&-
            sys.stdout.flush()
    except (KtmoeError, OSError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            # whoever read stdout has gone; what is left in its buffer must not fail again when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        if tracebacks:
            traceback.print_exc()
        return _fail(str(error) or "the system refused memory", 1)  # Python's own MemoryError says nothing
    except ModuleNotFoundError as error:
        if (missing := (error.name or "").partition(".")[0]) not in EXTRA:
            raise
        return _fail(f"the command needs {missing}, which is not installed: {install('cli')}", 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    return status


def _run(arguments: list[str]) -> int:
    import click

    from ktmoe.cli.commands import root

    try:
        return root.main(arguments, prog_name="ktmoe", standalone_mode=False) or 0
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "ktmoe"
        message = " ".join(error.format_message().split()).rstrip(".")
        return _fail(f"{message}; see {command} --help", error.exit_code)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except click.Abort:  # what click makes of KeyboardInterrupt
        raise KeyboardInterrupt from None


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Show ktmoe's warnings as its errors are shown. Others stay as they are."""
    with warnings.catch_warnings():
        others, ours = warnings.showwarning, Path(ktmoe.__file__).parent

        def show(message, category, filename, *more, **options):
            if ours in Path(filename).parents:
                _say(message)
            else:
                others(message, category, filename, *more, **options)

        warnings.showwarning = show
        yield


def _fail(message: str, status: int) -> int:
    _say(message)
    return status


def _say(message: object) -> None:
    if sys.stderr:  # there is none after 2>&-, and print() would take stdout instead
        print(f"ktmoe: {message}", file=sys.stderr)
