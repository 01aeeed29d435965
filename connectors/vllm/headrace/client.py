"""An engine's client of its node daemon, over the daemon's restarts and upgrades, without threads and without waiting.

Requests are collected; step() sends them in one system call and takes what came in another. Methods whose names begin with wait are
the only ones that wait, and never longer than they are told to. A Client is used by one thread.

An engine may attach as one client, which lends, presents and pushes, or as several: a control, which presents and binds for the
regions of its members, and a member for each rank's process (join=), which lends and pushes and names leases by LeaseRef.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Mapping, Sequence

from headrace import protocol
from headrace.connection import Refusal, Unavailable
from headrace.events import (
    Bound,
    Connected,
    Draining,
    Ended,
    Event,
    Lease,
    LeaseRef,
    Lost,
    Opened,
    Presented,
    PushRefused,
    Refused,
    Settled,
    Withdrawn,
)
from headrace.link import Link, Region
from headrace.protocol import BLOCKS_MAX, META_MAX, Code, EventFrame, State, Type, Unit, nonce_of
from headrace.work import Work

__all__ = ["Client", "Refusal", "Unavailable"]

_AGAIN_S, _AGAIN_MAX_S = 0.05, 2.0  # from one attempt to connect to the next
_RANKS_S = 0.01  # from one attempt to present to the next, while a rank's region is missing
PATIENCE_S = 5.0  # how long a lease waits for a daemon that would take it


class Client:
    """See the module."""

    def __init__(
        self,
        socket: str,
        engine: str,
        *,
        join: str = "",
        about: Mapping[str, object] | None = None,
        ring: bool = True,
        patience: float = PATIENCE_S,
    ) -> None:
        self.socket, self.engine, self.join = socket, engine, join
        self._about = dict(about) if about is not None else None
        self._ring = ring
        self._patience = patience
        self._regions: list[Region] = []
        self._current: Link | None = None
        self._greeting: Link | None = None  # beside the current one while that gives way
        self._retiring: list[Link] = []  # they gave way
        self._quarantine: list[Link] = []  # they are lost, and not yet fenced
        self._work: dict[bytes, Work] = {}  # living leases, by nonce
        self._events: list[Event] = []
        self._seq = 0
        self._again_at, self._again_s = 0.0, _AGAIN_S
        self._problem = ""
        self._refusal: Refusal | None = None
        self._closed = False

    # --- the daemon

    @property
    def ready(self) -> bool:
        """Whether there is a daemon that has all that was lent."""
        return self._current is not None and self._current.ready

    @property
    def node(self) -> str:
        """The daemon's node id, "" without a daemon."""
        return self._current.hello.node if self._current is not None else ""

    @property
    def address(self) -> str:
        """Where other nodes reach the daemon, "" without one."""
        return self._current.hello.address if self._current is not None else ""

    @property
    def problem(self) -> str:
        """Why there is no daemon to work with."""
        return "" if self.ready else self._problem

    def wait_ready(self, timeout: float = 10.0) -> None:
        """Waits until a daemon has accepted this engine and all that it lends. Refusal and Unavailable say what to do."""
        until = time.monotonic() + timeout
        self._again_at, self._refusal = 0.0, None
        while True:
            self._turn()
            if self.ready:
                return
            if self._refusal is not None and self._refusal.code not in (Code.DRAINING, Code.SHUTDOWN):
                raise self._refusal
            left = until - time.monotonic()
            if left <= 0:
                raise Unavailable(self._problem or f"the node daemon at {self.socket} did not answer within {timeout:g} s: is it stopped?")
            self._wait(min(left, max(0.001, self._again_at - time.monotonic()) if self._greeting is None else 0.1))

    def step(self) -> list[Event]:
        """Sends what was collected, and gives what came."""
        self._turn()
        events, self._events = self._events, []
        return events

    def flush(self) -> None:
        """Sends what was collected, without a look at what came."""
        for link in self._links():
            link.flush()

    def wait_news(self, timeout: float) -> None:
        """Waits until something came, or for so long. step() gives it."""
        if not self._events:
            self._wait(timeout)

    def describe(self, about: Mapping[str, object]) -> None:
        """Tells the daemon about the engine, for its status."""
        self._about = dict(about)
        for link in (self._current, self._greeting):
            if link is not None:
                link.describe(self._about)

    def close(self) -> None:
        """Closes everything at once. The daemon fences what was under way."""
        self._closed = True
        for link in [*self._links(), *self._quarantine]:
            link.release()
        self._current = self._greeting = None
        self._retiring, self._quarantine = [], []
        for region in self._regions:
            region.close()
        self._regions = []

    # --- memory

    def lend(self, fd: int, size: int, layout: bytes, *, read_only: bool = False, populate: bool = False) -> None:
        """Lends a memfd that is sealed against shrinking, to this daemon and to every later one. The descriptor stays the caller's."""
        flags = (protocol.READ_ONLY if read_only else 0) | (protocol.POPULATE if populate else 0)
        self._lend(Region(os.dup(fd), Type.REGISTER_REGION, protocol.register_region(size, layout, flags)))

    def lend_dmabuf(
        self, fd: int, size: int, offset: int, address: int, layout: bytes, *, device: str = "", read_only: bool = False
    ) -> None:
        """Lends a GPU's memory that was exported as a dma-buf. Code REGION says why no NIC here takes it."""
        flags = protocol.READ_ONLY if read_only else 0
        payload = protocol.register_dmabuf(size, offset, address, layout, device, flags)
        self._lend(Region(os.dup(fd), Type.REGISTER_DMABUF, payload))

    def _lend(self, region: Region) -> None:
        self._regions.append(region)
        for link in (self._current, self._greeting):
            if link is not None:
                link.lend(region)

    def take_back(self) -> None:
        """Forgets what was lent and refused, so that other memory may be lent instead. Only before anything was presented."""
        for region in self._regions:
            region.close()
        self._regions = []
        self._drop(self._current, "lending anew")
        self._drop(self._greeting, "lending anew")
        self._refusal, self._again_at = None, 0.0

    # --- P

    def present(self, ticket: bytes, peer: str, tokens: int, blocks: Sequence[int], meta: bytes = b"") -> Lease:
        """Offers a request's blocks to the ticket's other engine. Blocks not known yet follow by extend. Opened or an end answers."""
        if len(meta) > META_MAX:
            raise ValueError(f"meta of {len(meta)} bytes, at most {META_MAX}")
        lease = Lease("P", nonce_of(ticket), bytes(ticket), tokens, list(blocks))
        self._begin(Work(lease, peer=peer, meta=meta))
        return lease

    def extend(self, lease: Lease, blocks: Sequence[int]) -> None:
        """Adds blocks that follow those declared before."""
        if len(lease.blocks) + len(blocks) > BLOCKS_MAX:
            raise ValueError(f"{len(lease.blocks) + len(blocks)} blocks, at most {BLOCKS_MAX} in a lease")
        lease.blocks.extend(blocks)
        work = self._work.get(lease.nonce)
        if work is not None and work.lease is lease:
            self._catch_up(work)

    def handoff(self, lease: Lease, record: bytes) -> None:
        """Gives the record that D gets once everything has landed. All blocks must be declared by then."""
        if len(record) > protocol.RECORD_MAX:
            raise ValueError(f"hand-off record of {len(record)} bytes, at most {protocol.RECORD_MAX}")
        work = self._work.get(lease.nonce)
        if work is not None and work.lease is lease:
            work.record = bytes(record)
            self._catch_up(work)

    def push(self, ref: LeaseRef, units: Sequence[Unit]) -> int:
        """Says that units are complete in memory; they must not change until the lease is over. The number is Pushed's."""
        self._seq += 1
        link = next((x for x in self._links() if x.greeted and x.hello.epoch == ref.epoch), None)
        if link is None:
            # Not UNKNOWN_LEASE: another of the engine's connections may have met a new daemon before this one did.
            self._events.append(PushRefused(ref, self._seq, Code.INVALID, "there is no connection to that daemon"))
        else:
            link.push(ref, self._seq, units)
        return self._seq

    # --- D

    def bind(self, ticket: bytes, first_token: int, blocks: Sequence[int]) -> Lease:
        """Says where a presented request's KV shall land: blocks from token 0 on, those before first_token are ignored."""
        lease = Lease("D", nonce_of(ticket), bytes(ticket), blocks=list(blocks), first_token=first_token)
        self._begin(Work(lease))
        return lease

    def refuse(self, ticket: bytes, reason: str) -> None:
        """Says no to a ticket, presented or not. The other engine hears Refused."""
        nonce = nonce_of(ticket)
        link = self._presented_at(nonce) or self._current
        if link is not None and link.greeted:
            link.presented.pop(nonce, None)
            link.request(Type.REFUSE, protocol.refuse(ticket, reason))

    def _presented_at(self, nonce: bytes) -> Link | None:
        return next((x for x in self._links() if nonce in x.presented), None)

    # --- either

    def revoke(self, lease: Lease, reason: str) -> None:
        """Ends a lease. Its end, Ended or whatever was quicker, is the fence."""
        work = self._work.get(lease.nonce)
        if work is None or work.lease is not lease or work.revoking:
            return
        work.revoking = reason or "revoked"
        if work.link is None:
            self._over(work, Ended(lease, State.REVOKED, work.revoking))
        else:
            self._send_revoke(work)

    def wait_over(self, lease: Lease, timeout: float) -> bool:
        """Waits for a lease's end, after revoke for instance. What else comes meanwhile is given by the next step()."""
        until = time.monotonic() + timeout
        while not lease.over:
            self._turn()
            left = until - time.monotonic()
            if lease.over or left <= 0:
                break
            self._wait(min(left, 0.1))
        return lease.over

    # --- leases

    def _begin(self, work: Work) -> None:
        lease = work.lease
        if len(lease.blocks) > BLOCKS_MAX:
            raise ValueError(f"{len(lease.blocks)} blocks, at most {BLOCKS_MAX} in a lease")
        if lease.nonce in self._work:
            raise ValueError("this ticket is in use: a ticket is good for one attempt")
        work.until = time.monotonic() + self._patience
        self._work[lease.nonce] = work
        self._try(work)

    def _try(self, work: Work) -> None:
        """Presents or binds, where there is a daemon for it, and else leaves it to a later step."""
        now = time.monotonic()
        if now < work.again_at:
            return
        link = self._current
        if work.lease.role == "D":
            link = self._presented_at(work.lease.nonce) or link
        if link is None or not link.ready or link.draining and work.lease.role == "P":
            if now > work.until:
                why = self._problem or "the daemon gives way, and no other has come"
                self._over(work, Refused(work.lease, None, f"no node daemon within {self._patience:g} s: {why}"))
            return
        work.link = link
        kind, payload = work.request(link.region_ids())
        work.declared = len(work.lease.blocks)
        link.request(kind, payload, lambda value, refusal: self._answered(work, link, value, refusal))

    def _answered(self, work: Work, link: Link, value: int, refusal: Refusal | None) -> None:
        if self._work.get(work.lease.nonce) is not work or work.link is not link:
            return  # its end, or its way back to us, came before the answer
        if refusal is None:
            work.lease.ref = LeaseRef(link.hello.epoch, value)
            work.lease.bound |= work.lease.role == "D"
            link.presented.pop(work.lease.nonce, None)
            self._events.append(Opened(work.lease))
            self._catch_up(work)
        elif refusal.code is Code.RANKS_MISSING and time.monotonic() < work.until:
            self._later(work, _RANKS_S)
        elif refusal.code is Code.DRAINING and work.lease.role == "P":
            link.draining = True
            self._later(work, 0.0)
        else:
            link.presented.pop(work.lease.nonce, None)
            self._over(work, Refused(work.lease, refusal.code, refusal.text))

    def _later(self, work: Work, wait: float) -> None:
        """Its ticket is as good as before: it is tried again."""
        work.again()
        work.again_at = time.monotonic() + wait
        if work.revoking:
            self._over(work, Ended(work.lease, State.REVOKED, work.revoking))

    def _catch_up(self, work: Work) -> None:
        """Sends what came in while there was no lease to name yet."""
        lease, link = work.lease, work.link
        if link is None or lease.ref is None or work.revoking or lease.role != "P":
            return

        def answered(_: int, refusal: Refusal | None) -> None:
            if refusal is None or refusal.code in (Code.UNKNOWN_LEASE, Code.LEASE_ENDED) or work.link is not link:
                return  # its end is told by an event
            self.revoke(lease, f"the daemon refused to go on: {refusal.text}")

        if work.declared < len(lease.blocks):
            link.request(Type.EXTEND, protocol.extend(lease.ref.id, lease.blocks[work.declared :]), answered)
            work.declared = len(lease.blocks)
        if work.record is not None and not work.handed:
            work.handed = True
            link.request(Type.HANDOFF, protocol.handoff(lease.ref.id, work.record), answered)

    def _send_revoke(self, work: Work) -> None:
        link = work.link
        assert link is not None

        def answered(_: int, refusal: Refusal | None) -> None:
            if self._work.get(work.lease.nonce) is not work or work.link is not link:
                return
            if refusal is None or refusal.code in (Code.UNKNOWN_LEASE, Code.LEASE_ENDED):
                self._over(work, Ended(work.lease, State.REVOKED, work.revoking))
            else:  # only a new connection shows now that it is fenced
                link.lose(f"the node daemon did not revoke a lease: {refusal}")

        link.request(Type.REVOKE, protocol.revoke(0, work.lease.nonce, work.revoking), answered)

    def _over(self, work: Work, end: Event) -> None:
        work.lease.over = True
        self._work.pop(work.lease.nonce, None)
        self._events.append(end)

    # --- events

    def _event(self, link: Link, e: EventFrame) -> None:
        ref = LeaseRef(link.hello.epoch, e.lease)
        if e.type is Type.DRAINING:
            link.draining = True
            self._events.append(Draining(ref.epoch))
        elif e.type is Type.PRESENTED:
            link.presented[e.nonce] = ref
            self._events.append(Presented(e.nonce, e.tokens, e.layouts, e.text, e.data, ref))
        else:
            work = self._work.get(e.nonce)
            if work is None or work.link is not link:
                known = link.presented.pop(e.nonce, None) is not None
                if known or (e.lease == 0 and e.type is Type.ENDED):  # 0: nobody presents it any more
                    self._events.append(Withdrawn(e.nonce, e.text))
                    if work is not None and work.link is None:  # to be bound there, and waiting for a rank; else another daemon has it
                        self._over(work, Ended(work.lease, State.of(e.code), e.text))
                return
            link.presented.pop(e.nonce, None)
            self._lease_event(work, e)

    def _lease_event(self, work: Work, e: EventFrame) -> None:
        lease = work.lease
        if e.type is Type.BOUND:
            lease.bound, lease.first_token = True, e.first_token
            self._events.append(Bound(lease, e.first_token))
        elif e.type is Type.SETTLED:
            self._over(work, Settled(lease, e.data))
        elif e.type is Type.ENDED:
            self._over(work, Ended(lease, State.of(e.code), e.text))
        elif e.code == State.MOVED:
            work.until = time.monotonic() + self._patience
            self._later(work, 0.0)
        else:
            self._over(work, Refused(lease, None, e.text))

    # --- connections

    def _links(self) -> list[Link]:
        return [x for x in (self._current, self._greeting, *self._retiring) if x is not None]

    def _turn(self) -> None:
        """One round: send, take, and see to the connections."""
        if self._closed:
            return
        if self._current is None or self._current.draining:
            self._connect()
        for link in self._links():
            link.flush()
            link.read()
        self._greeted()
        for link in self._links():
            if link.lost is not None:
                self._drop(link, link.lost)
        self._fences()
        self._retire()
        for work in list(self._work.values()):
            if work.link is None:
                self._try(work)
        self.flush()  # answers to what came, at once

    def _connect(self) -> None:
        if self._greeting is not None or time.monotonic() < self._again_at:
            return
        self._back_off()
        try:
            link = Link(self.socket, self.engine, self.join, self._ring, self._event, lambda e: self._events.append(e))
        except Unavailable as e:
            self._trouble(str(e))
            return
        self._greeting = link
        for region in self._regions:
            link.lend(region)
        if self._about is not None:
            link.describe(self._about)

    def _back_off(self) -> None:
        self._again_at = time.monotonic() + self._again_s
        self._again_s = min(2 * self._again_s, _AGAIN_MAX_S)

    def _trouble(self, text: str) -> None:
        if text != self._problem:
            self._problem = text
            self._events.append(Lost(text))

    def _greeted(self) -> None:
        """Makes a daemon that has accepted us, and all we lend, the current one."""
        link = self._greeting
        if link is None or not link.ready or link.lost is not None:
            return
        self._greeting = None
        if self._current is not None:
            self._retiring.append(self._current)
        self._current = link
        self._problem, self._refusal, self._again_s = "", None, _AGAIN_S
        self._events.append(Connected(link.hello.epoch, link.hello.node, link.hello.address))
        for old in list(self._quarantine):
            if old.hello.epoch == link.hello.epoch:  # the same process says by that that everything of before is fenced
                self._fenced(old)

    def _drop(self, link: Link | None, why: str) -> None:
        """A connection is lost: what it was used for is quarantined until the daemon can touch nothing of it."""
        if link is None:
            return
        link.lose(why)
        had_given_way = link in self._retiring
        leased = link.greeted and any(work.link is link for work in self._work.values())
        self._current = None if link is self._current else self._current
        self._greeting = None if link is self._greeting else self._greeting
        self._retiring = [x for x in self._retiring if x is not link]
        self._refusal = link.refusal or link.hello_refusal or self._refusal
        for nonce in list(link.presented):
            self._events.append(Withdrawn(nonce, why))
        link.presented.clear()
        if had_given_way:  # as it had to, in the end
            self._events += [Lost(why)] if leased else []
        elif not link.code_is(Code.DRAINING):  # else it is the successor's turn: no news
            self._trouble(why)
        if leased:
            self._quarantine.append(link)
        else:
            link.release()

    def _fences(self) -> None:
        for link in list(self._quarantine):
            if link.gone():
                self._fenced(link)

    def _fenced(self, link: Link) -> None:
        self._quarantine.remove(link)
        for work in list(self._work.values()):
            if work.link is link:
                self._over(work, Ended(work.lease, State.LOST, link.lost or "the daemon is gone"))
        link.release()

    def _retire(self) -> None:
        """Closes connections to daemons that gave way, once they are not needed. A member's is: its regions are the control's
        leases', of which it does not know. The daemon closes it."""
        for link in list(self._retiring):
            busy = link.presented or any(work.link is link for work in self._work.values())
            if not busy and not self.join:
                self._retiring.remove(link)
                link.release()

    def _wait(self, timeout: float) -> None:
        """Waits for news of a connection, or for the end of a quarantined daemon's process."""
        poller = select.poll()
        for link in self._links():
            with contextlib.suppress(ValueError, OSError):
                poller.register(link.fileno(), select.POLLIN)
        for link in self._quarantine:
            poller.register(link.pidfd, select.POLLIN)
        poller.poll(max(1, round(timeout * 1000)))
