"""A connection and what it is used for: the regions lent over it, its ring, what was presented to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace import protocol, ring
from headrace.connection import Answer, Connection, Refusal
from headrace.events import LeaseRef, Pushed, PushRefused
from headrace.protocol import Code, EventFrame, HelloOK, ProtocolError, Type, Unit


@dataclass(frozen=True, slots=True)
class Region:
    """Memory to be lent, with the request that lends it."""

    fd: int
    kind: Type
    payload: bytes

    def close(self) -> None:
        os.close(self.fd)


class Link:
    """One life of a daemon, as a client uses it. What is asked for goes out behind HELLO, without waiting for its answer."""

    def __init__(
        self,
        path: str,
        engine: str,
        join: str,
        with_ring: bool,
        on_event: Callable[[Link, EventFrame], None],
        on_push: Callable[[Pushed | PushRefused], None],
    ) -> None:
        self.draining = False
        self.presented: dict[bytes, LeaseRef] = {}  # and neither bound nor refused
        self.refusal: Refusal | None = None  # of something without which it is of no use
        self._on_event, self._on_push = on_event, on_push
        self._conn = Connection(path, engine, self._event)
        self._seen = 0  # events 0x81 to 0x86, modulo 2^32: a ring's completions are placed by it
        self._regions: dict[int, int] = {}  # id by place
        self._lent = 0
        self._joined = not join
        self._ring: ring.Ring | None = None
        self._ring_ready = False
        if join:
            self.request(Type.JOIN, protocol.join(join), self._needed(f"join engine {join!r}", self._join_ok))
        if with_ring and ring.supported():
            self._setup_ring()

    # --- state

    @property
    def greeted(self) -> bool:
        """Whether the daemon has accepted this engine."""
        return self._conn.hello is not None

    @property
    def hello(self) -> HelloOK:
        """What the daemon said of itself. Only when greeted."""
        assert self._conn.hello is not None
        return self._conn.hello

    @property
    def ready(self) -> bool:
        """Whether it has all that was lent."""
        return self.greeted and self.lost is None and self._joined and len(self._regions) == self._lent

    @property
    def lost(self) -> str | None:
        """Why the connection ended."""
        return self._conn.closed

    @property
    def hello_refusal(self) -> Refusal | None:
        """The answer to HELLO, where that was no."""
        return self._conn.refused

    def code_is(self, code: Code) -> bool:
        """Whether the daemon ended it with this code."""
        return self._conn.code is code

    def region_ids(self) -> list[int]:
        """In the order lent; none for a control, whose members lend."""
        return [self._regions[i] for i in range(self._lent)]

    def gone(self) -> bool:
        return self._conn.gone()

    def fileno(self) -> int:
        return self._conn.fileno()

    @property
    def pidfd(self) -> int:
        return self._conn.pidfd

    # --- requests

    def request(self, kind: Type, payload: bytes, answer: Answer | None = None) -> None:
        self._conn.request(kind, payload, answer)

    def _needed(self, what: str, ok: Callable[[int], None]) -> Answer:
        """An answer without which the connection is of no use."""

        def answered(value: int, refusal: Refusal | None) -> None:
            if refusal is None:
                ok(value)
                return
            hint = "; the daemon is older than this connector: upgrade it" if refusal.code is Code.UNKNOWN_TYPE else ""
            self.refusal = Refusal(refusal.code, f"{what}: {refusal.text}{hint}")
            self.lose(f"the node daemon at {self._conn.path} refused to {self.refusal}")

        return answered

    def _join_ok(self, _: int) -> None:
        self._joined = True

    def lend(self, region: Region) -> None:
        place = self._lent
        self._lent += 1
        ok = self._needed("lend memory", lambda value: self._regions.__setitem__(place, value))
        self._conn.request(region.kind, region.payload, ok, [region.fd])

    def describe(self, about: Mapping[str, object]) -> None:
        """An older daemon does without."""
        self._conn.request(Type.DESCRIBE, protocol.describe(about))

    def _setup_ring(self) -> None:
        try:
            made = ring.Ring()
        except OSError:
            return  # messages do as well
        self._ring = made

        def answered(_: int, refusal: Refusal | None) -> None:
            self._ring_ready = refusal is None

        self._conn.request(Type.SETUP_RING, protocol.setup_ring(made.submissions, made.completions), answered, made.fds)

    def push(self, ref: LeaseRef, seq: int, units: Sequence[Unit]) -> None:
        """By ring where it can, else by message."""
        if self._ring is not None and self._ring_ready and self._ring.push(ref.id, seq, units):
            return

        def refused(_: int, refusal: Refusal | None) -> None:
            if refusal is not None:
                self._on_push(PushRefused(ref, seq, refusal.code, refusal.text))

        self._conn.quiet(Type.PUSH, protocol.push(ref.id, seq, units), refused)

    # --- in and out

    def flush(self) -> None:
        if self.lost is None:
            self._conn.flush()
            if self._ring is not None:
                self._ring.bell()

    def read(self) -> None:
        self._conn.read()
        self._completions()

    def _event(self, e: EventFrame) -> None:
        self._completions()  # those that come before it
        if e.type is not Type.DRAINING:
            self._seen = (self._seen + 1) & ring.MASK
        if e.type is Type.PUSHED:
            self._on_push(Pushed(LeaseRef(self.hello.epoch, e.lease), e.seq))
        else:
            self._on_event(self, e)

    def _completions(self) -> None:
        if self._ring is None or not self._ring_ready:
            return
        try:
            taken = self._ring.take(self._seen)
        except ProtocolError as e:
            self.lose(str(e))
            return
        for c in taken:
            ref = LeaseRef(self.hello.epoch, c.lease)
            code = Code.of(c.status)
            text = f"code {c.status} {code.name.lower().replace('_', '-')}"
            self._on_push(PushRefused(ref, c.seq, code, text) if c.status else Pushed(ref, c.seq))

    # --- end

    def lose(self, why: str) -> None:
        """Closes the connection, but keeps watching the daemon's process."""
        self._conn.close(why)

    def release(self) -> None:
        """Lets everything go."""
        self._conn.release()
        if self._ring is not None:
            self._ring.close()
            self._ring = None
