"""Progress on stderr, drawn by rich."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ktmoe.errors import UnavailableError

#: Called with (done, total).
Draw = Callable[[float, float], None]


@contextmanager
def bytes_done(what: str) -> Iterator[Draw]:
    """Draws bytes. Raises UnavailableError if rich is not installed."""
    rich = _rich()
    columns = (rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn(), rich.TimeRemainingColumn())
    with rich.Progress(rich.TextColumn(what), *columns, console=rich.Console(stderr=True)) as bar:
        yield _add(bar, what, None)


@contextmanager
def steps() -> Iterator[Callable[..., AbstractContextManager[Draw]]]:
    """A function (description, total=None) that starts a step, whose bar vanishes when it is done.

    total None: not known, the bar moves back and forth. Nothing is drawn where stderr is no terminal, whatever rich makes of
    FORCE_COLOR. Raises UnavailableError if rich is not installed.
    """
    rich = _rich()
    columns = (
        rich.TextColumn("{task.description:<32}"),
        rich.BarColumn(),
        rich.TaskProgressColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=rich.Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:

        @contextmanager
        def step(description: str, total: float | None = None) -> Iterator[Draw]:
            yield _add(bar, description, total)
            bar.remove_task(bar.task_ids[-1])

        yield step


def _rich():
    """rich.progress, which has rich's Console, too."""
    try:
        from rich import progress
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        raise UnavailableError("a progress bar needs rich, which is not installed: pip install 'ktmoe[cli]'") from None
    return progress


def _add(bar, description: str, total: float | None) -> Draw:
    task = bar.add_task(description, total=total)

    def draw(done: float, total: float) -> None:
        bar.update(task, completed=done, total=total)

    return draw
