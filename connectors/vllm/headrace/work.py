"""What a client remembers of a lease until its end, so that it can be presented again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace import protocol
from headrace.events import Lease
from headrace.link import Link
from headrace.protocol import Type


@dataclass(eq=False, slots=True)
class Work:
    """A lease and how far it has come."""

    lease: Lease
    peer: str = ""
    meta: bytes = b""
    record: bytes | None = None
    link: Link | None = None  # where it was asked for; None: nowhere yet
    declared: int = 0  # blocks that the daemon knows
    handed: bool = False
    revoking: str = ""  # the reason
    until: float = 0.0  # how long it may wait for a daemon
    again_at: float = 0.0

    def request(self, regions: Sequence[int]) -> tuple[Type, bytes]:
        """PRESENT or BIND."""
        lease = self.lease
        if lease.role == "P":
            return Type.PRESENT, protocol.present(lease.ticket, self.peer, lease.tokens, lease.blocks, regions, self.meta)
        return Type.BIND, protocol.bind(lease.ticket, lease.first_token, lease.blocks, regions)

    def again(self) -> None:
        """Nobody knows of it any more."""
        self.link = None
        self.lease.ref = None
        self.lease.bound = self.handed = False
        self.declared = 0
