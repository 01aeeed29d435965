"""Frames and payloads of the protocol between an engine and its node daemon, as docs/protocol.md has them.

This module knows bytes and nothing else: no socket, no state. Requests are encoded, answers and events decoded; what does not parse
raises ProtocolError, after which a connection's frames are lost.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MAGIC = b"HRU1"
VERSION = 2
PAYLOAD_MAX = 2 << 20
RECORD_MAX = 1 << 20
META_MAX = 64 << 10
BLOCKS_MAX = 65536
REGIONS_MAX = 64
UNITS_MAX = 65536
ENGINE_ID_MAX = 63
TEXT_MAX = 1024
LAYOUT_SIZE = 128
TICKET_SIZE = 352
NONCE_SIZE = 16
ALL_LAYERS = 0xFFFFFFFF

HEADER = struct.Struct("<4sBBHIIQ")  # magic, version, 0, type, length, flags, request id
EVENT = struct.Struct("<Q16sQIIIIHHI")  # lease, nonce, seq, tokens, first token, layouts, data, text, code, 0
UNIT = struct.Struct("<IIII")  # layer, first block, blocks, shard
QUIET = 1
POPULATE = 2
READ_ONLY = 1


class ProtocolError(Exception):
    """The other side sent what this protocol does not have. The connection cannot go on."""


class Type(enum.IntEnum):
    """Message types."""

    HELLO = 0x01
    REGISTER_REGION = 0x02
    REMOVE_REGION = 0x03
    PRESENT = 0x04
    PUSH = 0x05
    HANDOFF = 0x06
    BIND = 0x07
    REFUSE = 0x08
    REVOKE = 0x09
    PING = 0x0A
    STATUS = 0x0B
    SETUP_RING = 0x0C
    REGISTER_DMABUF = 0x0D
    EXTEND = 0x0E
    JOIN = 0x0F
    DESCRIBE = 0x10
    HELLO_OK = 0x41
    OK = 0x42
    ERROR = 0x43
    PONG = 0x44
    STATUS_OK = 0x45
    PRESENTED = 0x81
    BOUND = 0x82
    REFUSED = 0x83
    PUSHED = 0x84
    SETTLED = 0x85
    ENDED = 0x86
    GOODBYE = 0x87
    DRAINING = 0x88


class Code(enum.IntEnum):
    """Codes of ERROR and GOODBYE. One that is not listed counts as INTERNAL."""

    VERSION = 1
    MALFORMED = 2
    UNKNOWN_TYPE = 3
    FRAMING = 4
    DESCRIPTOR = 5
    STATE = 6
    ATTACHED = 7
    BUSY = 8
    REGION = 9
    LAYOUT = 10
    PLAN = 11
    UNKNOWN_REGION = 12
    UNKNOWN_LEASE = 13
    LEASE_ENDED = 14
    NOT_PRESENTED = 15
    TICKET_USED = 16
    WRONG_TICKET = 17
    BAD_TICKET = 18
    EXPIRED = 19
    LIMIT = 20
    INVALID = 21
    SHUTDOWN = 22
    DENIED = 23
    SLOW = 24
    INTERNAL = 25
    DRAINING = 26
    RANKS_MISSING = 27

    @classmethod
    def of(cls, number: int) -> Code:
        try:
            return cls(number)
        except ValueError:
            return cls.INTERNAL


class State(enum.IntEnum):
    """What became of a lease. LOST is this client's own: the daemon's process is gone, and the lease with it."""

    LOST = 0
    OPEN = 1
    BOUND = 2
    SETTLED = 3
    REVOKED = 4
    EXPIRED = 5
    MOVED = 6

    @classmethod
    def of(cls, number: int) -> State:
        try:
            return cls(number)
        except ValueError:
            return cls.REVOKED


@dataclass(frozen=True, slots=True)
class Unit:
    """Blocks [first, first+count) of a request, of one layer or ALL_LAYERS; of all regions, or of the shard-th, from 1 on."""

    layer: int
    first: int
    count: int
    shard: int = 0


@dataclass(frozen=True, slots=True)
class Frame:
    """One message as it came."""

    type: int
    request: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class HelloOK:
    """What a daemon says of itself."""

    version: int
    pid: int
    epoch: int
    payload_max: int
    in_flight_max: int
    ping_ms: int
    silence_ms: int
    node: str
    address: str


@dataclass(frozen=True, slots=True)
class EventFrame:
    """An event, with all fields that any kind has."""

    type: Type
    lease: int
    nonce: bytes
    seq: int
    tokens: int
    first_token: int
    code: int
    layouts: tuple[bytes, ...]
    text: str
    data: bytes


# --- frames


def frame(kind: int, request: int, payload: bytes = b"", flags: int = 0, version: int = VERSION) -> bytes:
    """One message."""
    if len(payload) > PAYLOAD_MAX:
        raise ValueError(f"payload of {len(payload)} bytes, at most {PAYLOAD_MAX} fit a message")
    return HEADER.pack(MAGIC, version, 0, kind, len(payload), flags, request) + payload


class Splitter:
    """Cuts a stream into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes | memoryview) -> None:
        """Takes what came."""
        self._data += data

    def __iter__(self) -> Splitter:
        return self

    def __next__(self) -> Frame:
        data = self._data
        if len(data) < HEADER.size:
            raise StopIteration
        magic, version, reserved, kind, length, _, request = HEADER.unpack_from(data)
        if magic != MAGIC or reserved != 0 or length > PAYLOAD_MAX:
            raise ProtocolError(f"a frame begins with {bytes(data[: HEADER.size]).hex(' ')}: frames are lost")
        if version != VERSION and kind not in (Type.ERROR, Type.HELLO_OK):
            raise ProtocolError(f"a frame of version {version}, agreed was {VERSION}")
        if len(data) < HEADER.size + length:
            raise StopIteration
        payload = bytes(data[HEADER.size : HEADER.size + length])
        del data[: HEADER.size + length]
        return Frame(kind, request, payload)


# --- requests


def _ids(form: str, ids: Iterable[int]) -> bytes:
    listed = list(ids)
    return struct.pack(f"<{len(listed)}{form}", *listed)


def _text(text: str) -> bytes:
    """Bounded as the protocol bounds texts; a cut inside a character drops it."""
    return text.encode()[:TEXT_MAX].decode(errors="ignore").encode()


def _engine(engine: str) -> bytes:
    name = engine.encode()
    if not 1 <= len(name) <= ENGINE_ID_MAX:
        raise ValueError(f"engine id {engine!r} has {len(name)} bytes, need 1 to {ENGINE_ID_MAX}")
    return name


def hello(engine: str, low: int = VERSION, high: int = VERSION, silence_ms: int = 0) -> bytes:
    name = _engine(engine)
    return struct.pack("<HHIHHI", low, high, silence_ms, len(name), 0, 0) + name


def register_region(size: int, layout: bytes, flags: int = 0) -> bytes:
    return struct.pack("<QII", size, flags, len(layout)) + layout


def register_dmabuf(size: int, offset: int, address: int, layout: bytes, device: str = "", flags: int = 0) -> bytes:
    name = device.encode()
    return struct.pack("<QQQIHH", size, offset, address, flags, len(layout), len(name)) + layout + name


def remove_region(region: int) -> bytes:
    return struct.pack("<Q", region)


def present(ticket: bytes, peer: str, tokens: int, blocks: Sequence[int], regions: Sequence[int], meta: bytes = b"") -> bytes:
    address = peer.encode()
    head = struct.pack("<IIIHHHHI", tokens, len(blocks), len(meta), len(ticket), len(address), len(regions), 0, 0)
    return head + _ids("Q", regions) + _ids("I", blocks) + ticket + address + meta


def push(lease: int, seq: int, units: Sequence[Unit]) -> bytes:
    parts = [struct.pack("<QQII", lease, seq, len(units), 0)]
    parts += [UNIT.pack(u.layer, u.first, u.count, u.shard) for u in units]
    return b"".join(parts)


def handoff(lease: int, record: bytes) -> bytes:
    if len(record) > RECORD_MAX:
        raise ValueError(f"hand-off record of {len(record)} bytes, at most {RECORD_MAX}")
    return struct.pack("<QII", lease, len(record), 0) + record


def bind(ticket: bytes, first_token: int, blocks: Sequence[int], regions: Sequence[int]) -> bytes:
    head = struct.pack("<IIHHI", first_token, len(blocks), len(ticket), len(regions), 0)
    return head + _ids("Q", regions) + _ids("I", blocks) + ticket


def refuse(ticket: bytes, reason: str) -> bytes:
    text = _text(reason)
    return struct.pack("<HHI", len(ticket), len(text), 0) + ticket + text


def revoke(lease: int, nonce: bytes, reason: str) -> bytes:
    text = _text(reason)
    return struct.pack("<Q16sHHI", lease, nonce, len(text), 0, 0) + text


def ping(value: int) -> bytes:
    return struct.pack("<Q", value)


def setup_ring(submissions: int, completions: int) -> bytes:
    return struct.pack("<IIQ", submissions, completions, 0)


def extend(lease: int, blocks: Sequence[int]) -> bytes:
    return struct.pack("<QII", lease, len(blocks), 0) + _ids("I", blocks)


def join(engine: str) -> bytes:
    name = _engine(engine)
    return struct.pack("<HHI", len(name), 0, 0) + name


def describe(about: Mapping[str, object]) -> bytes:
    document = json.dumps(about, separators=(",", ":"), sort_keys=True).encode()
    return struct.pack("<II", len(document), 0) + document


# --- answers and events


def _exact(payload: bytes, size: int, kind: str) -> None:
    if len(payload) != size:
        raise ProtocolError(f"{kind} of {len(payload)} bytes, want {size}")


def _unpack(form: struct.Struct, payload: bytes, kind: str) -> tuple[int, ...]:
    if len(payload) < form.size:
        raise ProtocolError(f"{kind} of {len(payload)} bytes, want at least {form.size}")
    return form.unpack_from(payload)


_HELLO_OK = struct.Struct("<HHIQIIIIHHI")
_ERROR = struct.Struct("<HHI")
_VALUE = struct.Struct("<Q")
_DOCUMENT = struct.Struct("<II")


def parse_hello_ok(payload: bytes) -> HelloOK:
    version, _, pid, epoch, payload_max, in_flight, ping_ms, silence_ms, n, a, _ = _unpack(_HELLO_OK, payload, "HELLO_OK")
    at = _HELLO_OK.size
    _exact(payload, at + n + a, "HELLO_OK")
    if version != VERSION:
        raise ProtocolError(f"the daemon chose version {version}, this client speaks {VERSION}")
    node, address = payload[at : at + n].decode(errors="replace"), payload[at + n :].decode(errors="replace")
    return HelloOK(version, pid, epoch, payload_max, in_flight, ping_ms, silence_ms, node, address)


def parse_ok(payload: bytes) -> int:
    _exact(payload, _VALUE.size, "OK")
    return _unpack(_VALUE, payload, "OK")[0]


def parse_error(payload: bytes) -> tuple[int, str]:
    code, n, _ = _unpack(_ERROR, payload, "ERROR")
    _exact(payload, _ERROR.size + n, "ERROR")
    return code, payload[_ERROR.size :].decode(errors="replace")


def parse_pong(payload: bytes) -> int:
    _exact(payload, _VALUE.size, "PONG")
    return _unpack(_VALUE, payload, "PONG")[0]


def parse_status_ok(payload: bytes) -> str:
    n, _ = _unpack(_DOCUMENT, payload, "STATUS_OK")
    _exact(payload, _DOCUMENT.size + n, "STATUS_OK")
    return payload[_DOCUMENT.size :].decode(errors="replace")


def parse_event(kind: int, payload: bytes) -> EventFrame:
    try:
        event = Type(kind)
    except ValueError:
        raise ProtocolError(f"an event of type {kind:#x}, which this client does not know") from None
    if len(payload) < EVENT.size:
        raise ProtocolError(f"{event.name} of {len(payload)} bytes, want at least {EVENT.size}")
    lease, nonce, seq, tokens, first, layouts, data, text, code, reserved = EVENT.unpack_from(payload)
    _exact(payload, EVENT.size + layouts + text + data, event.name)
    if layouts % LAYOUT_SIZE and event is not Type.PRESENTED or reserved:
        raise ProtocolError(f"{event.name} with {layouts} bytes of layouts, {reserved} in a reserved field")
    at = EVENT.size
    cut = tuple(payload[i : min(i + LAYOUT_SIZE, at + layouts)] for i in range(at, at + layouts, LAYOUT_SIZE))
    at += layouts
    reason = payload[at : at + text].decode(errors="replace")
    return EventFrame(event, lease, nonce, seq, tokens, first, code, cut, reason, payload[at + text :])


def nonce_of(ticket: bytes) -> bytes:
    """A ticket's nonce, by which events name its lease. Engines read nothing else of a ticket."""
    if len(ticket) < 8 + NONCE_SIZE or ticket[:4] != b"HRTK":
        raise ValueError(f"a ticket of {len(ticket)} bytes that begins with {ticket[:4]!r}: it was altered on its way from the router")
    return bytes(ticket[8 : 8 + NONCE_SIZE])
