"""Node daemons for tests, and what a router and an engine would bring: tickets and memory."""

from __future__ import annotations

import hashlib
import hmac
import json
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from headrace import osys
from headrace.client import Client
from headrace.events import Event

KEY = bytes(range(32))
LIMIT_S = 20.0  # of a wait in a test
BLOCK_TOKENS = 16
HEAD_BYTES = 256
E = TypeVar("E")


class Node:
    """One `headrace node` on loopback."""

    def __init__(self, folder: Path, name: str, *args: str) -> None:
        self.name, self.folder = name, folder
        self.socket = str(folder / f"{name}.sock")
        self.args = ["--id", name, "--data-dir", str(folder / name), "--socket", self.socket, *args]
        (folder / "key").write_text(KEY.hex() + "\n")
        (folder / "key").chmod(0o600)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.address = ""
        self.start()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.processes[-1]

    def start(self, *more: str) -> None:
        """Starts a daemon and waits until it serves."""
        ready = self.folder / f"{self.name}.{len(self.processes)}.ready"
        log = (self.folder / f"{self.name}.log").open("ab")
        binary = os.environ["HEADRACE_BIN"]
        command = [binary, "node", "--cluster-key-file", str(self.folder / "key"), "--ready-file", str(ready), *self.args, *more]
        with log:
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        until = time.monotonic() + LIMIT_S
        while not ready.exists():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < until, f"{self.name} was not ready in {LIMIT_S:g} s\n{self.log()}"
            select.select([], [], [], 0.01)
        self.said = json.loads(ready.read_text())

    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        for p in self.processes:
            if p.poll() is None:
                p.send_signal(signal.SIGCONT)
                p.kill()
            p.wait()


class Memory:
    """A cache of one layer, one plane and one head, in a memfd."""

    def __init__(self, blocks: int, fingerprint: bytes = bytes(32)) -> None:
        self.blocks, self.block_bytes = blocks, BLOCK_TOKENS * HEAD_BYTES
        self.size = blocks * self.block_bytes
        self.fd = osys.memfd("test-cache", self.size)
        self.bytes = mmap.mmap(self.fd, self.size)
        head = struct.pack("<BBH11I", 1, 1, 0, 1, blocks, BLOCK_TOKENS, 1, 1, 0, 1, HEAD_BYTES, 0, 1, 0)
        self.layout = head + struct.pack("<6Q", 0, self.size, self.block_bytes, self.block_bytes, HEAD_BYTES, HEAD_BYTES) + fingerprint

    def fill(self, block: int, seed: int) -> bytes:
        data = hashlib.shake_128(struct.pack("<QQ", block, seed)).digest(self.block_bytes)
        self.bytes[block * self.block_bytes : (block + 1) * self.block_bytes] = data
        return data

    def block(self, block: int) -> bytes:
        return self.bytes[block * self.block_bytes : (block + 1) * self.block_bytes]

    def clear(self) -> None:
        self.bytes[:] = bytes(self.size)

    def close(self) -> None:
        self.bytes.close()
        os.close(self.fd)


def ticket(p: Node, d: Node, p_engine: str = "p", d_engine: str = "d", seconds: float = 60.0) -> bytes:
    """As the router mints them."""

    def name(text: str) -> bytes:
        return bytes([len(text)]) + text.encode().ljust(63, b"\0")

    deadline = int((time.time() + seconds) * 1000)
    body = struct.pack("<4sBBH16s32sq", b"HRTK", 1, 0, 352, os.urandom(16), bytes(32), deadline)
    body += name(p.name) + name(d.name) + name(p_engine) + name(d_engine)
    return body + hmac.new(KEY, body, hashlib.sha256).digest()


VOID, IDLE, LOOK = 0, 1, 2
REMEMBERED, REVOKED, ENDED, REFUSED, FULL, LIVING, ABSENT = 1, 2, 3, 4, 5, 6, 7


def recall(address: str, kind: int, *tickets: bytes) -> list[int]:
    """As routers do, over a daemon's data address: a verdict for each ticket."""

    def read(n: int) -> bytes:
        data = b""
        while len(data) < n:
            more = sock.recv(n - len(data))
            assert more, "the daemon closed the connection"
            data += more
        return data

    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), LIMIT_S) as sock:
        name = bytes([6]) + b"router".ljust(63, b"\0")
        hello = struct.pack("<8sHHHH16s32s64sQ64s", b"HEADRACE", 2, 2, 5, 0, os.urandom(16), os.urandom(32), name, 0, bytes(64))
        sock.sendall(hello)
        challenge = read(216)
        assert challenge[10:12] == bytes(2), "the daemon refused the connection"
        sock.sendall(hmac.new(KEY, b"headrace 1 dial" + hello + challenge, hashlib.sha256).digest())
        assert read(4) == bytes(4)
        reason = b"nobody presented it"
        sock.sendall(struct.pack("<4sHHHHI", b"HRRC", 2 if kind else 1, len(tickets), len(reason), kind, 0) + b"".join(tickets) + reason)
        assert read(8) == struct.pack("<4sHH", b"HRRA", 1, len(tickets))
        return list(read(len(tickets)))


class Steps:
    """Steps clients as engines do, one after the other, and keeps what each has heard."""

    def __init__(self, clients: Iterable[Client]) -> None:
        self.clients = list(clients)
        self.heard: dict[int, list[Event]] = {id(c): [] for c in self.clients}

    def of(self, client: Client, kind: type[E]) -> list[E]:
        return [e for e in self.heard[id(client)] if isinstance(e, kind)]

    def once(self) -> None:
        for c in self.clients:
            self.heard[id(c)] += c.step()

    def until(self, condition: Callable[[], object], what: str = "") -> None:
        """An engine computes between two steps; here a poll of half a millisecond stands for that."""
        limit = time.monotonic() + LIMIT_S
        while True:
            self.once()
            if condition():
                return
            assert time.monotonic() < limit, f"waited {LIMIT_S:g} s for {what or condition}; heard {list(self.heard.values())}"
            select.select([], [], [], 0.0005)

    def one(self, client: Client, kind: type[E]) -> E:
        """Waits for an event of a kind, which must be the only one."""
        self.until(lambda: self.of(client, kind), kind.__name__)
        (event,) = self.of(client, kind)
        return event
