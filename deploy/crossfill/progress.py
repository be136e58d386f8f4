"""Progress of a command as bars, one for each stage of its work."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class Bars:
    """Draws each stage of a build or measurement as one rich progress bar."""

    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """`done` of `total` steps of `stage` are made; None if nobody knows how many there are."""
        if stage not in self._tasks:
            # A stage of unknown length ends when the next begins.
            self.finish()
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)

    def finish(self) -> None:
        """Fill the bars of stages whose length nobody knew."""
        for task in self._tasks.values():
            if self._bars.tasks[task].total is None:
                self._bars.update(task, total=1, completed=1)


@contextmanager
def bars() -> Iterator[Bars]:
    """Progress on standard error, so that a table can be redirected."""
    from rich import progress as parts
    from rich.console import Console

    columns = (
        parts.TextColumn("{task.description}"),
        parts.BarColumn(),
        parts.TaskProgressColumn(),
        parts.TimeElapsedColumn(),
        parts.TimeRemainingColumn(),
    )
    with parts.Progress(*columns, console=Console(stderr=True)) as shown:
        drawn = Bars(shown)
        yield drawn
        drawn.finish()
