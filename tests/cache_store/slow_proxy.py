"""A way to a server that is slow, or that lets only so much through."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable


class SlowProxy:
    """Stands between clients and a server on loopback, on a port of its own.

    Attributes:
        delay_s: before each piece of an answer.
        piece_bytes: of an answer at once.
        most_bytes: that all clients together may send; what goes beyond is held back, and `held` is set.
    """

    def __init__(self, port: int, *, most_bytes: int = 1 << 60) -> None:
        self.delay_s, self.piece_bytes, self.most_bytes = 0.0, 1 << 16, most_bytes
        self.held = threading.Event()
        self.pieces = 0
        self._server, self._lock, self._stopped = port, threading.Lock(), threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        """Close everything."""
        self._stopped.set()
        self._listening.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
                self._open += [client, server]
                for pump in (self._ask, self._answer):
                    threading.Thread(target=self._run, args=(pump, client, server), daemon=True).start()

    def _run(
        self, pump: Callable[[socket.socket, socket.socket], None], client: socket.socket, server: socket.socket
    ) -> None:
        with contextlib.suppress(OSError):
            pump(client, server)
        for connection in (client, server):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        while data := client.recv(1 << 16):
            with self._lock:
                through = data[: self.most_bytes]
                self.most_bytes -= len(through)
            server.sendall(through)
            if len(through) < len(data):
                self.held.set()
                self._stopped.wait()
                return

    def _answer(self, client: socket.socket, server: socket.socket) -> None:
        while data := server.recv(1 << 16):
            for start in range(0, len(data), self.piece_bytes):
                time.sleep(self.delay_s)
                client.sendall(data[start : start + self.piece_bytes])
                self.pieces += 1
