"""One connection to one life of a node daemon. Nothing here waits: frames are collected and go out together, and what came is taken.

A connection knows requests and their answers. What leases and regions are is its owner's business (client).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace import osys, protocol
from headrace.protocol import Code, EventFrame, Frame, HelloOK, ProtocolError, Type

_READ = 256 << 10
_READS_MAX = 16  # a step: what is left comes with the next one
_BUFFERS_MAX = 512  # of one sendmsg; the kernel takes 1024
_OUT_MAX = 64 << 20  # a daemon that reads nothing is given up
_QUIET_MAX = 16384  # quiet requests whose refusal is waited for
_HELLO_S = 7.0  # the daemon waits 5 s for an earlier connection's fence before it answers
_LOOK_S = 0.1  # the most that one look counts of a silence, lest our own stop be taken for the daemon's


class Unavailable(Exception):
    """There is no daemon to talk to; the text says what to do."""


class Refusal(Exception):
    """The daemon answered ERROR."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} (code {code} {Code.of(code).name.lower().replace('_', '-')})")
        self.code = Code.of(code)
        self.text = text


Answer = Callable[[int, Refusal | None], None]  # the OK's value, or why not


@dataclass(slots=True)
class _Part:
    """Bytes of the outbox. Descriptors begin a sendmsg of their own."""

    data: memoryview
    fds: list[int] = field(default_factory=list)


class Connection:
    """A socket to the daemon, from connect to close."""

    def __init__(self, path: str, engine: str, on_event: Callable[[EventFrame], None]) -> None:
        self.path = path
        self.hello: HelloOK | None = None
        self.closed: str | None = None  # why
        self.code: Code | None = None  # with which the daemon refused HELLO or said goodbye
        self.refused: Refusal | None = None  # HELLO
        self._on_event = on_event
        self._out: deque[_Part] = deque()
        self._out_bytes = 0
        self._held: deque[tuple[int, bytes, Answer | None, list[int]]] = deque()  # behind the limit of requests in flight
        self._in = protocol.Splitter()
        self._pending: dict[int, Answer | None] = {}
        self._quiet: dict[int, Answer] = {}
        self._next = 0
        self._silence = 0.0
        self._looked = self._pinged = time.monotonic()
        self._pidfd = -1
        self._sock = _dial(path)
        try:
            self._pidfd = osys.peer_process(self._sock)  # before HELLO: its answer proves that the process id was not reused
        except OSError as e:
            self._sock.close()
            raise Unavailable(
                f"the node daemon at {path} cannot be watched, so memory lent to it would never be safe again once it is gone: {e}; "
                "run engine and daemon in one PID namespace"
            ) from e
        self._put(Type.HELLO, protocol.hello(engine), None, [])

    def fileno(self) -> int:
        """To wait for news."""
        return self._sock.fileno()

    @property
    def pidfd(self) -> int:
        """Readable once the daemon's process has ended."""
        return self._pidfd

    def gone(self) -> bool:
        """Whether the daemon's process has ended. From then on nothing touches lent memory."""
        return self._pidfd < 0 or osys.readable(self._pidfd)

    # --- out

    def request(self, kind: int, payload: bytes, answer: Answer | None = None, fds: Sequence[int] = ()) -> None:
        """Collects a request. The answer is told in read(). The descriptors stay the caller's: copies travel."""
        if self.closed is not None:
            return
        copies = [os.dup(fd) for fd in fds]
        if self._held or len(self._pending) >= self._in_flight_max():
            self._held.append((kind, payload, answer, copies))
        else:
            self._put(kind, payload, answer, copies)

    def quiet(self, kind: int, payload: bytes, refused: Answer) -> None:
        """Collects a request that is answered only when it is refused."""
        if self.closed is not None:
            return
        self._next += 1
        self._quiet[self._next] = refused
        if len(self._quiet) > _QUIET_MAX:  # the oldest was taken long since
            del self._quiet[next(iter(self._quiet))]
        self._add(_Part(memoryview(protocol.frame(kind, self._next, payload, protocol.QUIET))))

    def _in_flight_max(self) -> int:
        return max(1, self.hello.in_flight_max - 1) if self.hello else 64  # one is the ping's

    def _put(self, kind: int, payload: bytes, answer: Answer | None, fds: list[int]) -> None:
        self._next += 1
        self._pending[self._next] = answer
        self._add(_Part(memoryview(protocol.frame(kind, self._next, payload)), fds))

    def _add(self, part: _Part) -> None:
        self._out.append(part)
        self._out_bytes += len(part.data)

    def flush(self) -> None:
        """Sends what was collected: one sendmsg, but for what begins one of its own or does not fit the socket."""
        self._ping()
        while self._held and len(self._pending) < self._in_flight_max():
            self._put(*self._held.popleft())
        while self._out and self.closed is None:
            parts = [self._out[0]]
            for part in list(self._out)[1:_BUFFERS_MAX]:
                if part.fds:
                    break
                parts.append(part)
            try:
                sent = self._send(parts)
            except BlockingIOError:
                if self._out_bytes > _OUT_MAX:
                    self.close(f"the node daemon at {self.path} reads nothing: {self._out_bytes} bytes wait for it")
                return
            except OSError as e:  # what it said before may still be there: read() finds the end
                if not isinstance(e, (BrokenPipeError, ConnectionError)):
                    self.close(f"send to the node daemon at {self.path}: {e}")
                self._forget()
                return
            self._sent(sent)

    def _send(self, parts: list[_Part]) -> int:
        data = [part.data for part in parts]
        fds = parts[0].fds
        return socket.send_fds(self._sock, data, fds) if fds else self._sock.sendmsg(data)

    def _sent(self, n: int) -> None:
        self._out_bytes -= n
        while n > 0:
            part = self._out[0]
            while part.fds:  # they went with the first byte
                os.close(part.fds.pop())
            if n < len(part.data):
                part.data = part.data[n:]
                return
            n -= len(part.data)
            self._out.popleft()

    def _forget(self) -> None:
        for fd in [fd for part in self._out for fd in part.fds] + [fd for held in self._held for fd in held[3]]:
            os.close(fd)
        self._out.clear()
        self._held.clear()
        self._out_bytes = 0

    def _ping(self) -> None:
        now = time.monotonic()
        if self.hello and now - self._pinged >= self.hello.ping_ms / 1000:
            self._pinged = now
            self._put(Type.PING, protocol.ping(self._next), None, [])

    # --- in

    def read(self) -> None:
        """Takes what came: answers and events go to their receivers, in their order."""
        if self.closed is not None:
            return
        heard = False
        for _ in range(_READS_MAX):
            try:
                data = self._sock.recv(_READ)
            except BlockingIOError:
                break
            except OSError as e:
                self.close(f"the connection to the node daemon at {self.path} broke: {e.strerror}")
                return
            if not data:
                self.close(f"the node daemon at {self.path} closed the connection")
                return
            heard = True
            self._take(data)
            if self.closed is not None or len(data) < _READ:
                break
        self._listen(heard)

    def _listen(self, heard: bool) -> None:
        now = time.monotonic()
        self._silence = 0.0 if heard else self._silence + min(now - self._looked, _LOOK_S)
        self._looked = now
        limit = self.hello.silence_ms / 1000 if self.hello else _HELLO_S
        if not self._pending:  # nothing it would have to say
            self._silence = 0.0
        if self._silence > limit:
            self.close(f"the node daemon at {self.path} has been silent for {limit:g} s: is it stopped?")

    def _take(self, data: bytes) -> None:
        self._in.feed(data)
        try:
            for frame in self._in:
                self._dispatch(frame)
                if self.closed is not None:
                    return
        except ProtocolError as e:
            self.close(f"the node daemon at {self.path}: {e}")

    def _dispatch(self, frame: Frame) -> None:
        if frame.type >= Type.PRESENTED:
            event = protocol.parse_event(frame.type, frame.payload)
            if event.type is Type.GOODBYE:
                self.code = Code.of(event.code)
                self.close(f"the node daemon at {self.path} said goodbye: {event.text} (code {event.code})")
            else:
                self._on_event(event)
            return
        refused = Refusal(*protocol.parse_error(frame.payload)) if frame.type == Type.ERROR else None
        if self.hello is None:
            self._greeted(frame, refused)
            return
        if frame.request in self._quiet:
            answer: Answer | None = self._quiet.pop(frame.request)
        elif frame.request in self._pending:
            answer = self._pending.pop(frame.request)
        else:
            raise ProtocolError(f"an answer to request {frame.request}, which is not open")
        if answer is not None:
            answer(protocol.parse_ok(frame.payload) if frame.type == Type.OK else 0, refused)

    def _greeted(self, frame: Frame, refused: Refusal | None) -> None:
        if refused is not None:
            self.code, self.refused = refused.code, refused
            self.close(f"the node daemon at {self.path} refused this engine: {refused}")
            return
        if frame.type != Type.HELLO_OK:
            raise ProtocolError(f"answered HELLO with type {frame.type:#x}")
        hello = protocol.parse_hello_ok(frame.payload)
        if not hello.ping_ms or not hello.silence_ms or hello.in_flight_max < 2:
            raise ProtocolError(f"HELLO_OK makes no sense: {hello}")
        self._pending.pop(frame.request, None)
        self.hello = hello

    # --- end

    def close(self, why: str) -> None:
        """Closes the socket, but keeps watching the process."""
        if self.closed is not None:
            return
        self.closed = why
        with contextlib.suppress(OSError):
            self._sock.close()
        self._forget()

    def release(self) -> None:
        """Lets the process go as well."""
        self.close("closed by this engine")
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _dial(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setblocking(False)
        sock.connect(path)
    except FileNotFoundError:
        why = "there is no such socket: is `headrace node` running on this host, and with this --socket?"
    except ConnectionRefusedError:
        why = "nobody listens there: `headrace node` has ended, start it again"
    except PermissionError:
        why = "not allowed: run engine and daemon as the same user, or the daemon with --allow-uid and a socket this user can reach"
    except BlockingIOError:
        why = "the daemon accepts no connections: is it stopped, or overloaded?"
    except OSError as e:
        why = str(e)
    else:
        return sock
    sock.close()
    raise Unavailable(f"connect to the node daemon at {path}: {why}")
