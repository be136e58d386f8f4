"""A server that takes connections and does something odd instead of answering as Redis does."""

import contextlib
import socket
import threading
from collections.abc import Callable

Behaviour = Callable[[socket.socket], None]


class OddServer:
    """Runs `behave` for each connection, on a free loopback port, until it is stopped."""

    def __init__(self, behave: Behaviour) -> None:
        self._behave = behave
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.connections = 0
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """A store that is not there."""
        return f"redis://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                self.connections += 1
                self._open.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self._behave(connection)

    def stop(self) -> None:
        """Close everything."""
        self._listening.close()
        for connection in self._open:
            connection.close()
