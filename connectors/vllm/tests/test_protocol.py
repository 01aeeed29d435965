"""The bytes of docs/protocol.md are this package's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace import protocol, ring
from headrace.protocol import Code, EventFrame, Frame, ProtocolError, Splitter, Type, Unit

DOC = Path(__file__).parents[3] / "docs" / "protocol.md"
ID = 0x0102030405060708
NONCE = bytes(range(0xA0, 0xB0))
LAYOUT = b"\1\2\3\4"  # of four bytes, for the dump's sake


def dumps() -> dict[str, bytes]:
    found = re.findall(r"```hex (\w+)\n(.*?)\n```", DOC.read_text(), re.S)
    return {name: bytes.fromhex(text) for name, text in found}


DUMPS = dumps()

REQUESTS = {
    "HELLO": protocol.hello("prefill-0", silence_ms=3000),
    "REGISTER_REGION": protocol.register_region(1 << 20, LAYOUT),
    "PRESENT": protocol.present(b"TICKET", "10.0.0.2:7500", 33, [5, 9, 2], [7, 10], b"meta"),
    "PUSH": protocol.push(11, 3, [Unit(0, 0, 3), Unit(1, 0, 2, 1)]),
    "HANDOFF": protocol.handoff(11, b"record"),
    "BIND": protocol.bind(b"TICKET", 16, [0, 4, 6], [8, 9]),
    "REFUSE": protocol.refuse(b"TICKET", "no blocks"),
    "REVOKE": protocol.revoke(11, NONCE, "client left"),
    "REMOVE_REGION": protocol.remove_region(7),
    "PING": protocol.ping(99),
    "SETUP_RING": protocol.setup_ring(256, 512),
    "REGISTER_DMABUF": protocol.register_dmabuf(1 << 20, 4096, 0x7F0000001000, LAYOUT, "0000:3b:00.0", protocol.READ_ONLY),
    "STATUS": b"",
    "EXTEND": protocol.extend(11, [7, 3]),
    "JOIN": protocol.join("prefill-0"),
    "DESCRIBE": protocol.describe({"engine": "vllm"}),
}
EVENTS = {
    "PRESENTED": EventFrame(Type.PRESENTED, 0, NONCE, 0, 33, 0, 0, (LAYOUT,), "prefill-0", b"meta"),
    "BOUND": EventFrame(Type.BOUND, 11, NONCE, 0, 33, 16, 0, (), "", b""),
    "PUSHED": EventFrame(Type.PUSHED, 11, NONCE, 3, 0, 0, 0, (), "", b""),
    "SETTLED": EventFrame(Type.SETTLED, 12, NONCE, 0, 0, 0, 0, (), "", b"record"),
    "REFUSED": EventFrame(Type.REFUSED, 11, NONCE, 0, 0, 0, 0, (), "no blocks", b""),
    "ENDED": EventFrame(Type.ENDED, 12, NONCE, 0, 0, 0, 4, (), "client left", b""),
    "DRAINING": EventFrame(Type.DRAINING, 0, bytes(16), 0, 0, 0, 0, (), "", b""),
    "GOODBYE": EventFrame(Type.GOODBYE, 0, bytes(16), 0, 0, 0, Code.SHUTDOWN, (), "daemon is stopping", b""),
}
ANSWERS = ("HELLO_OK", "OK", "ERROR", "PONG", "STATUS_OK")
ELSEWHERE = ("RING_HEADER", "RING_PUSH", "RING_PUSHED", "RING_REFUSED", "TICKET", "LAYOUT", "DATA_HEADER", "DATA_TRAILER")


def one(dump: bytes) -> Frame:
    splitter = Splitter()
    splitter.feed(dump)
    (frame,) = splitter
    return frame


def test_every_dump_is_compared() -> None:
    assert set(DUMPS) <= {*REQUESTS, *EVENTS, *ANSWERS, *ELSEWHERE}


@pytest.mark.parametrize("name", [n for n in REQUESTS if n in DUMPS])
def test_request(name: str) -> None:
    assert protocol.frame(Type[name], ID, REQUESTS[name]).hex(" ") == DUMPS[name].hex(" ")


@pytest.mark.parametrize("name", EVENTS)
def test_event(name: str) -> None:
    frame = one(DUMPS[name])
    assert frame.type == Type[name]
    assert protocol.parse_event(frame.type, frame.payload) == EVENTS[name]


def test_answers() -> None:
    hello = protocol.parse_hello_ok(one(DUMPS["HELLO_OK"]).payload)
    assert (hello.version, hello.pid, hello.epoch, hello.node, hello.address) == (2, 4242, 0x1122334455667788, "node-a", "10.0.0.1:7500")
    assert (hello.payload_max, hello.in_flight_max, hello.ping_ms, hello.silence_ms) == (2 << 20, 1024, 500, 2500)
    ok = one(DUMPS["OK"])
    assert (ok.type, ok.request, protocol.parse_ok(ok.payload)) == (Type.OK, ID, 7)
    assert protocol.parse_error(one(DUMPS["ERROR"]).payload) == (Code.REGION, "memfd is not sealed against shrinking")
    assert protocol.parse_pong(one(DUMPS["PONG"]).payload) == 99
    assert protocol.parse_status_ok(one(DUMPS["STATUS_OK"]).payload) == '{"node":"a"}'


def test_codes_are_the_documents() -> None:
    text = DOC.read_text()
    for number, name in re.findall(r"^ {2,7}(\d+) ([a-z-]+) {2,}\S", text, re.M):
        if name.replace("-", "_").upper() in Code.__members__:
            assert Code[name.replace("-", "_").upper()] == int(number)
    for code in Code:
        name = code.name.lower().replace("_", "-")
        assert code is Code.RANKS_MISSING or re.search(rf"^ +{code} {name} ", text, re.M), f"{code} {name} is not in the document"


def test_ring_entries() -> None:
    assert ring.HEAD.pack(b"HRR1", 1, 256, 1024) == DUMPS["RING_HEADER"][:16]
    assert ring.COMPLETION.unpack(DUMPS["RING_PUSHED"]) == (1, 0, 2, 11, 3, NONCE, bytes(24))
    assert ring.COMPLETION.unpack(DUMPS["RING_REFUSED"])[:5] == (1, Code.LEASE_ENDED, 2, 11, 3)


def test_a_stream_in_any_pieces() -> None:
    stream = b"".join(DUMPS[n] for n in (*EVENTS, "HELLO_OK", "OK", "ERROR"))
    for size in (1, 7, 24, 25, len(stream)):
        splitter, got = Splitter(), []
        for i in range(0, len(stream), size):
            splitter.feed(stream[i : i + size])
            got += list(splitter)
        assert [f.type for f in got] == [Type[n] for n in (*EVENTS, "HELLO_OK", "OK", "ERROR")]


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, 0x00), (3, 0x32), (4, 3), (5, 1), (11, 0xFF)],
    ids=["magic", "end of magic", "version", "reserved", "length"],
)
def test_lost_frames_are_noticed(at: int, value: int) -> None:
    bad = bytearray(DUMPS["SETTLED"])
    bad[at] = value
    with pytest.raises(ProtocolError):
        one(bytes(bad))


@pytest.mark.parametrize("name", EVENTS)
def test_no_event_parses_when_cut_or_longer(name: str) -> None:
    payload = one(DUMPS[name]).payload
    for n in range(len(payload)):
        with pytest.raises(ProtocolError):
            protocol.parse_event(Type[name], payload[:n])
    with pytest.raises(ProtocolError):
        protocol.parse_event(Type[name], payload + b"\0")


def test_answers_of_other_lengths_do_not_parse() -> None:
    for parse, name in (
        (protocol.parse_hello_ok, "HELLO_OK"),
        (protocol.parse_ok, "OK"),
        (protocol.parse_error, "ERROR"),
        (protocol.parse_status_ok, "STATUS_OK"),
    ):
        payload = one(DUMPS[name]).payload
        for bad in (payload[:-1], payload + b"\0", b""):
            with pytest.raises(ProtocolError):
                parse(bad)


def test_texts_are_cut_between_characters() -> None:
    payload = protocol.refuse(b"", "ä" * 600)
    assert payload[8:].decode() == "ä" * 512


def test_nonce() -> None:
    assert protocol.nonce_of(DUMPS["TICKET"]) == NONCE
    with pytest.raises(ValueError, match="altered"):
        protocol.nonce_of(b"HRT")


@pytest.mark.parametrize("engine", ["", "x" * 64])
def test_engine_ids(engine: str) -> None:
    with pytest.raises(ValueError, match="need 1 to 63"):
        protocol.hello(engine)
