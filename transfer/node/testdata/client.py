"""A whole client of the node daemon's unix protocol, written from docs/protocol.md with Python's standard library alone.

    client.py SOCKET ENGINE_ID PEER TICKET_HEX

It lends two memfds of two blocks, one a tensor-parallel rank, presents the ticket, pushes block 1, filled with a pattern,
and hands a record off. It prints
one line of JSON when the lease has settled. It shows the protocol; an engine would not wait in between.
"""
import ctypes
import fcntl
import json
import mmap
import os
import socket
import struct
import sys

HEADER = struct.Struct("<4sBBHIIQ")  # magic, version, 0, type, length, flags, request id
EVENT = struct.Struct("<Q16sQIIIIHHI")  # lease, nonce, seq, tokens, first token, layouts, data, text, code, 0
HELLO, REGISTER_REGION, PRESENT, PUSH, HANDOFF, PING = 0x01, 0x02, 0x04, 0x05, 0x06, 0x0A
HELLO_OK, OK, ERROR, PONG = 0x41, 0x42, 0x43, 0x44
PRESENTED, BOUND, REFUSED, PUSHED, SETTLED, ENDED, GOODBYE, DRAINING = range(0x81, 0x89)
QUIET = 1
VERSION = 2

F_ADD_SEALS, SEALS = 1033, 0x1 | 0x2 | 0x4  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW


class Refused(Exception):
    pass


class Daemon:
    """One connection: requests go out with ids, answers and events are told apart by their type."""

    def __init__(self, path, engine_id):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(20)
        self.sock.connect(path)
        self.next_id, self.answers, self.events, self.draining = 0, {}, [], False
        name = engine_id.encode()
        request = self.send(HELLO, struct.pack("<HHIHHI", VERSION, VERSION, 0, len(name), 0, 0) + name)
        fixed = struct.Struct("<HHIQIIIIHHI")
        payload = self.answer(request, HELLO_OK)
        (self.version, _, self.pid, self.epoch, _, _, self.ping_ms, self.silence_ms, node, addr, _) = fixed.unpack_from(payload)
        text = payload[fixed.size :].decode()
        self.node_id, self.data_addr = text[:node], text[node : node + addr]

    def send(self, kind, payload, flags=0, fd=None):
        self.next_id += 1
        frame = HEADER.pack(b"HRU1", VERSION, 0, kind, len(payload), flags, self.next_id) + payload
        if fd is None:
            self.sock.sendall(frame)
        else:  # the descriptor travels with the first byte
            sent = socket.send_fds(self.sock, [frame], [fd])
            self.sock.sendall(frame[sent:])
        return self.next_id

    def read(self, n):
        parts = bytearray()
        while len(parts) < n:
            part = self.sock.recv(n - len(parts))
            if not part:
                raise EOFError("the daemon closed the connection")
            parts += part
        return bytes(parts)

    def pump(self):
        """Takes one frame."""
        magic, version, _, kind, length, _, request = HEADER.unpack(self.read(HEADER.size))
        if magic != b"HRU1" or version != VERSION or length > 2 << 20:
            raise ValueError("frames are lost")
        payload = self.read(length)
        if kind < PRESENTED:
            self.answers[request] = (kind, payload)
            return
        lease, nonce, seq, tokens, first, layouts, data, text, code, _ = EVENT.unpack_from(payload)
        if kind == DRAINING:  # an engine that lives longer would connect again now, beside this connection
            self.draining = True
            return
        at = EVENT.size + layouts
        reason, record = payload[at : at + text].decode(), payload[at + text : at + text + data]
        self.events.append({"kind": kind, "lease": lease, "nonce": nonce, "seq": seq, "tokens": tokens,
                            "first_token": first, "code": code, "text": reason, "data": record})

    def answer(self, request, want=OK):
        while request not in self.answers:
            self.pump()
        kind, payload = self.answers.pop(request)
        if kind == ERROR:
            code, size, _ = struct.unpack_from("<HHI", payload)
            raise Refused(f"code {code}: {payload[8:8 + size].decode()}")
        if kind != want:
            raise ValueError(f"type {kind:#x}, want {want:#x}")
        return payload if want != OK else struct.unpack("<Q", payload)[0]

    def event(self, want):
        while True:
            while not self.events:
                self.pump()
            ev = self.events.pop(0)
            if ev["kind"] == want:
                return ev
            if ev["kind"] in (REFUSED, ENDED, GOODBYE):
                raise Refused(ev["text"])

    def register(self, fd, size, layout):
        return self.answer(self.send(REGISTER_REGION, struct.pack("<QII", size, 0, len(layout)) + layout, fd=fd))

    def present(self, regions, ticket, peer, tokens, blocks, meta=b""):
        """The regions are those of a shard set, in order of rank."""
        peer = peer.encode()
        head = struct.pack("<IIIHHHHI", tokens, len(blocks), len(meta), len(ticket), len(peer), len(regions), 0, 0)
        ids = struct.pack(f"<{len(regions)}Q{len(blocks)}I", *regions, *blocks)
        return self.answer(self.send(PRESENT, head + ids + ticket + peer + meta))

    def push(self, lease, units, seq):
        """Units are (layer, first block, blocks, shard): shard 0 is all regions. Quiet: only a refusal is answered, and
        nobody waits for it here."""
        body = b"".join(struct.pack("<IIII", *u) for u in units)
        self.send(PUSH, struct.pack("<QQII", lease, seq, len(units), 0) + body, flags=QUIET)

    def handoff(self, lease, record):
        return self.answer(self.send(HANDOFF, struct.pack("<QII", lease, len(record), 0) + record))


def layout(blocks, block_tokens, head_bytes, rank, ranks):
    """One layer, one plane, one head a rank: a block is block_tokens * head_bytes contiguous bytes."""
    block = block_tokens * head_bytes
    head = struct.pack("<BBH11I", 1, 1, 0, 1, blocks, block_tokens, 1, 1, rank, ranks, head_bytes, rank, ranks, 0)
    return head + struct.pack("<6Q", 0, blocks * block, block, block, head_bytes, head_bytes) + bytes(32)


def memory(size):
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("python-engine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:  # a libc older than the kernel
        fd = ctypes.CDLL(None, use_errno=True).syscall(319, b"python-engine", 3)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, F_ADD_SEALS, SEALS)
    return fd, mmap.mmap(fd, size)


def main(path, engine_id, peer, ticket):
    tokens, head_bytes, blocks = 16, 256, 2
    size = tokens * head_bytes * blocks
    daemon, regions = Daemon(path, engine_id), []
    for rank in range(2):  # two tensor-parallel ranks of one head each
        fd, mem = memory(size)
        mem[size // 2 :] = bytes((i * 7 + 3 + rank) & 0xFF for i in range(size // 2))
        regions.append(daemon.register(fd, size, layout(blocks, tokens, head_bytes, rank, 2)))
    lease = daemon.present(regions, bytes.fromhex(ticket), peer, tokens, [1], b"from python")
    bound = daemon.event(BOUND)
    daemon.push(lease, [(0, 0, 1, 0)], 41)
    pushed = daemon.event(PUSHED)
    daemon.handoff(lease, b"record of python")
    daemon.event(SETTLED)
    daemon.answer(daemon.send(PING, struct.pack("<Q", 1)), PONG)
    print(json.dumps({"node": daemon.node_id, "seq": pushed["seq"], "first_token": bound["first_token"]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
