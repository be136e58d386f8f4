"""Ctrl-C once asks for an orderly end, twice for one at once."""

import asyncio
import signal


class Stop:
    """What SIGINT and SIGTERM ask of a running program; must be made inside the event loop."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.now = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        (self.now if self.asked.is_set() else self.asked).set()
