"""A real Redis server for a test, on a free loopback port and without anything on disk."""

import math
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import redis

START_TIMEOUT_S = 20
SLOTS = 16384


class RedisServer:
    """A redis-server that a test started; stopped by its own process id. A node of a cluster has all slots or none."""

    def __init__(self, folder: Path, *, slots: bool = True, **options: str) -> None:
        self.port, self._slots = free_port(), slots
        self.password = options.get("requirepass", "")
        self._folder, self._options = folder, options
        self._folder.mkdir(parents=True, exist_ok=True)
        self.start()

    def url(self, scheme: str = "redis", **options: str) -> str:
        """A store on it; each option is one of the URL's."""
        query = "?" * bool(options) + "&".join(f"{name}={value}" for name, value in options.items())
        return f"{scheme}://{f':{self.password}@' * bool(self.password)}127.0.0.1:{self.port}{query}"

    def client(self) -> redis.Redis:
        """A plain client, for looking at it from outside."""
        return redis.Redis(port=self.port, password=self.password or None, socket_timeout=START_TIMEOUT_S)

    def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "save": "",
            "appendonly": "no",
            "dir": str(self._folder),
            **{name.replace("_", "-"): value for name, value in self._options.items()},
        }
        command = ["redis-server", *(word for name, value in settings.items() for word in (f"--{name}", value))]
        # Own files only, so that its output can be read after a failure.
        with (self._folder / "output.txt").open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        self._await()

    def _await(self) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                with self.client() as client:
                    if self._slots and self._options.get("cluster_enabled") == "yes" and client.info("cluster"):
                        self._await_slots(client)
                    client.ping()
                return
            except (redis.ConnectionError, redis.ResponseError):
                if time.monotonic() > end or self._process.poll() is not None:
                    pytest.fail(f"redis-server did not start: {(self._folder / 'output.txt').read_text()}")
                time.sleep(0.02)

    @staticmethod
    def _await_slots(client: redis.Redis) -> None:
        state = client.execute_command("CLUSTER INFO")
        if str(state.get("cluster_slots_assigned")) != str(SLOTS):
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, SLOTS - 1)
        if client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
            raise redis.ConnectionError("the cluster is not formed yet")

    def pause(self) -> None:
        """Let it hang: it accepts connections and answers none."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it at once, as a crash would."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def restart(self) -> None:
        """End it and start it again on its port, empty."""
        self.stop()
        self.start()


def age_leases(client: redis.Redis, name: str, seconds: float) -> None:
    """Let a store's leases end so much earlier, as if the time had passed on the server, whose clock cannot be set."""
    root = b"{%s}" % name.encode()
    for lease, expiry_ms in client.zrange(root + b":e", 0, -1, withscores=True):
        if expiry_ms < math.inf:
            earlier = int(expiry_ms - seconds * 1000)
            client.zadd(root + b":e", {lease: earlier})
            client.hset(root + b":h:" + lease[24:], lease[:24], str(earlier))


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
