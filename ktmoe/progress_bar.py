"""Progress on stderr, drawn by rich: on terminals and in notebooks alone, whatever rich makes of FORCE_COLOR.

Where stderr is a file or a pipe, nothing is drawn. Without rich, UnavailableError is raised there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ktmoe.errors import UnavailableError
from ktmoe.messages import install

#: Called with (done, total).
Draw = Callable[[float, float], None]


@contextmanager
def bytes_done(what: str) -> Iterator[Draw]:
    """Draws bytes."""
    rich = _rich()
    columns = (rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn(), rich.TimeRemainingColumn())
    with _bar(rich, rich.TextColumn(what), *columns) as bar:
        yield _add(bar, what, None)


@contextmanager
def steps() -> Iterator[Callable[..., AbstractContextManager[Draw]]]:
    """A function (description, total=None) that starts a step, whose bar vanishes when it is done.

    total None: not known, the bar moves back and forth.
    """
    rich = _rich()
    columns = (
        rich.TextColumn("{task.description:<32}"),
        rich.BarColumn(),
        rich.TaskProgressColumn(),
        rich.TimeRemainingColumn(),
    )
    with _bar(rich, *columns, transient=True) as bar:

        @contextmanager
        def step(description: str, total: float | None = None) -> Iterator[Draw]:
            yield _add(bar, description, total)
            bar.remove_task(bar.task_ids[-1])

        yield step


def _rich() -> Any:
    """rich.progress, which has rich's Console, too."""
    try:
        from rich import progress
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        raise UnavailableError(f"a progress bar needs rich, which is not installed: {install('cli')}") from None
    return progress


def _bar(rich: Any, *columns: Any, **options: Any) -> Any:
    console = rich.Console(stderr=True)
    return rich.Progress(*columns, console=console, disable=not (console.is_jupyter or console.file.isatty()), **options)


def _add(bar: Any, description: str, total: float | None) -> Draw:
    task = bar.add_task(description, total=total)

    def draw(done: float, total: float) -> None:
        bar.update(task, completed=done, total=total)

    return draw
