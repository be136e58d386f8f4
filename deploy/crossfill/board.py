"""What `crossfill up` shows while it starts: a live table on a terminal, a line a change elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from crossfill.child import Child, State

_STYLE = {State.STARTING: "yellow", State.READY: "green", State.ENDED: "red", State.STOPPED: "dim"}


class Board:
    """Shows children as they start, and says in a line what happens to them later.

    Args:
        console: where to write.
        clock: seconds, monotonic.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._children: list[Child] = []
        self._since: dict[str, float] = {}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_table()

    def add(self, child: Child) -> None:
        """Put a child on the table."""
        self._children.append(child)
        self._since[child.spec.name] = self._clock()

    def show(self, child: Child) -> None:
        """Note a change of a child's state."""
        self._since[child.spec.name] = self._clock()
        if self._live is None:
            style = _STYLE[child.state]
            self._line(f"{escape(child.spec.name)} [{style}]{child.state}[/{style}] {escape(child.detail)}".rstrip())

    def ready(self, text: str) -> None:
        """End the table and print how to use the service."""
        self._end_table()
        self._line(f"\n{escape(text)}\n")

    def stopping(self) -> None:
        """Say that the stop has begun."""
        self._end_table()
        self._line("stopping: running requests may finish, then router and workers end; Ctrl-C again to stop now")

    def _end_table(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in ("process", "state", ""):
            table.add_column(column)
        now = self._clock()
        for child in self._children:
            style = _STYLE[child.state]
            waited = f"{now - self._since[child.spec.name]:.0f} s" if child.state is State.STARTING else child.detail
            table.add_row(child.spec.name, f"[{style}]{child.state}[/{style}]", escape(waited))
        return table
