"""Pushes and their completions in memory shared with the daemon, as "The ring" in docs/protocol.md has it.

Python has no memory fences. So this end rings the daemon's doorbell after it stored a tail, whatever the daemon's flags say, and leaves
its own NEED_WAKEUP set for good: the protocol allows both. It also relies on stores becoming visible in their order, which x86-64
promises and other processors do not: elsewhere supported() is False, and pushes go as messages.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import struct
from collections.abc import Sequence
from typing import NamedTuple

from headrace import osys
from headrace.protocol import UNIT, ProtocolError, Unit

HEAD = struct.Struct("<4sIII")
SUBMISSION = struct.Struct("<HHIQQ")  # kind, ranges, 0, lease, seq
COMPLETION = struct.Struct("<HHIQQ16s24s")  # kind, status, after, lease, seq, nonce, 0
SUB_HEAD, SUB_TAIL, COMP_HEAD, COMP_TAIL, FLAGS = 64, 128, 256, 320, 384
FIRST, ENTRY = 4096, 64
PUSH = 1
RANGES_MAX = 2
NEED_WAKEUP = 1
MASK = 0xFFFFFFFF


class Completion(NamedTuple):
    """What became of a push: status 0 when all of it has landed, else the code it was refused with."""

    status: int
    lease: int
    seq: int


def supported() -> bool:
    """Whether stores keep their order here."""
    return platform.machine() in ("x86_64", "AMD64")


class Ring:
    """The engine's end. fds go with SETUP_RING."""

    def __init__(self, submissions: int = 256, completions: int = 1024) -> None:
        for n in (submissions, completions):
            if n & (n - 1) or not 2 <= n <= 4096:
                raise ValueError(f"a ring's queue of {n} entries: need a power of two from 2 to 4096")
        if completions < 2 * submissions:
            raise ValueError(f"{completions} completions for {submissions} submissions: need at least twice as many")
        self.submissions, self.completions = submissions, completions
        self._tail = self._head = 0
        self._rung = True
        size = FIRST + ENTRY * (submissions + completions)
        self._fds: list[int] = []
        try:
            self._fds.append(osys.memfd("headrace-ring", size))
            self._memory = mmap.mmap(self._fds[0], size)
            self._fds += [osys.eventfd(), osys.eventfd()]
        except OSError:
            self.close()
            raise
        self._bytes = memoryview(self._memory)
        self._words = self._bytes.cast("I")  # aligned loads and stores of four bytes, whole
        HEAD.pack_into(self._memory, 0, b"HRR1", 1, submissions, completions)
        self._store(FLAGS, NEED_WAKEUP)

    @property
    def fds(self) -> list[int]:
        """Memory, the daemon's doorbell, ours: in SETUP_RING's order."""
        return list(self._fds)

    def _load(self, at: int) -> int:
        return self._words[at >> 2]

    def _store(self, at: int, value: int) -> None:
        self._words[at >> 2] = value & MASK

    def push(self, lease: int, seq: int, units: Sequence[Unit]) -> bool:
        """Puts a push in. False: it is too long for an entry, or the queue is full; it is to go as a message."""
        if not 1 <= len(units) <= RANGES_MAX or self._in_queue() >= self.submissions:
            return False
        entry = SUBMISSION.pack(PUSH, len(units), 0, lease, seq)
        entry += b"".join([UNIT.pack(u.layer, u.first, u.count, u.shard) for u in units])
        at = FIRST + ENTRY * (self._tail % self.submissions)
        self._bytes[at : at + ENTRY] = entry.ljust(ENTRY, b"\0")
        self._tail = (self._tail + 1) & MASK
        self._store(SUB_TAIL, self._tail)
        self._rung = False
        return True

    def _in_queue(self) -> int:
        n = (self._tail - self._load(SUB_HEAD)) & MASK
        if n > self.submissions:
            raise ProtocolError(f"the daemon took submissions that were never made: {n} in a queue of {self.submissions}")
        return n

    def bell(self) -> None:
        """Rings for what was put in since. Without news it costs nothing."""
        if not self._rung:
            self._rung = True
            with contextlib.suppress(BlockingIOError):  # full: it rings already
                os.write(self._fds[1], b"\1\0\0\0\0\0\0\0")

    def take(self, seen: int) -> list[Completion]:
        """Takes the completions that follow the first `seen` events. Without news it costs one load."""
        tail = self._load(COMP_TAIL)
        if tail == self._head:
            return []
        if (tail - self._head) & MASK > self.completions:
            raise ProtocolError(f"the ring's completions go from {self._head} to {tail}: more than its {self.completions}")
        taken: list[Completion] = []
        while tail != self._head:
            at = FIRST + ENTRY * (self.submissions + self._head % self.completions)
            kind, status, after, lease, seq, _, zero = COMPLETION.unpack_from(self._bytes, at)
            if kind != PUSH or any(zero):
                raise ProtocolError(f"a completion of kind {kind}, which this client does not know")
            if (seen - after) & MASK >= 1 << 31:
                break
            self._head = (self._head + 1) & MASK
            taken.append(Completion(status, lease, seq))
        if taken:
            self._store(COMP_HEAD, self._head)
        return taken

    def close(self) -> None:
        """Gives descriptors and memory back. The daemon keeps its own until this engine is fenced."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        if hasattr(self, "_words"):
            self._words.release()
            self._bytes.release()
        if hasattr(self, "_memory"):
            self._memory.close()
