"""What a client tells of its leases. Events are values: they hold no connection and may be kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from headrace.protocol import Code, State


class LeaseRef(NamedTuple):
    """Names a lease to any connection with the same daemon: two integers, which go from process to process as they are."""

    epoch: int  # of the daemon's life
    id: int


@dataclass(eq=False, slots=True)
class Lease:
    """The right to move one request's KV. The client keeps it up to date; over means fenced: its blocks may be used again."""

    role: Literal["P", "D"]
    nonce: bytes
    ticket: bytes = field(repr=False)
    tokens: int = 0
    blocks: list[int] = field(default_factory=list, repr=False)
    ref: LeaseRef | None = None  # None until the daemon took it
    bound: bool = False
    first_token: int = 0
    over: bool = False


@dataclass(frozen=True, slots=True)
class Presented:
    """D: P offers a request's KV. Bind or refuse it."""

    nonce: bytes
    tokens: int
    layouts: tuple[bytes, ...] = field(repr=False)  # of P's regions, in order of rank
    engine: str  # P's
    meta: bytes = field(repr=False)
    ref: LeaseRef


@dataclass(frozen=True, slots=True)
class Opened:
    """The daemon took PRESENT or BIND; lease.ref is known. It comes again, with another ref, when a daemon gave way before it had
    presented the lease and the client presented it to the successor: what was pushed before must then be pushed again."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Bound:
    """P: D took it. Only blocks that hold tokens from first_token on are wanted."""

    lease: Lease
    first_token: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The end: everything landed. D gets P's hand-off record."""

    lease: Lease
    record: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ended:
    """The end: revoked, expired, or, with State.LOST, the daemon's process is gone."""

    lease: Lease
    state: State
    text: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The end: D, or one of the daemons, did not take it. code is the daemon's when it refused the request itself."""

    lease: Lease
    code: Code | None
    text: str


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """D: what had been presented, and was not bound, is over."""

    nonce: bytes
    text: str


@dataclass(frozen=True, slots=True)
class Pushed:
    """All units of a push have landed."""

    ref: LeaseRef
    seq: int


@dataclass(frozen=True, slots=True)
class PushRefused:
    """A push was not taken. UNKNOWN_LEASE and LEASE_ENDED say merely that it came after the lease's end; INVALID perhaps that
    it came too soon."""

    ref: LeaseRef
    seq: int
    code: Code
    text: str


@dataclass(frozen=True, slots=True)
class Connected:
    """News: a daemon accepted this engine."""

    epoch: int
    node: str
    address: str


@dataclass(frozen=True, slots=True)
class Draining:
    """News: the daemon gives way to a successor at the same path."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Lost:
    """News: a connection ended, or could not be made. Its leases' ends come once they are fenced."""

    text: str


Event: TypeAlias = Presented | Opened | Bound | Settled | Ended | Refused | Withdrawn | Pushed | PushRefused | Connected | Draining | Lost
OVER = (Settled, Ended, Refused)
