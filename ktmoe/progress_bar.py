"""A progress bar on stderr, drawn by rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ktmoe.errors import UnavailableError


@contextmanager
def bytes_done(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function that draws (done_bytes, total_bytes). Raises UnavailableError if rich is not installed."""
    try:
        from rich import progress
        from rich.console import Console
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        raise UnavailableError("progress=True draws with rich, which is not installed: pip install 'ktmoe[cli]'") from None
    columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn(), progress.TimeRemainingColumn())
    with progress.Progress(progress.TextColumn(what), *columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)

        def draw(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield draw
