"""A whole client of the node daemon's unix protocol, written from docs/protocol.md with Python's standard library alone.

    client.py SOCKET ENGINE_ID PEER TICKET_HEX [messages | members]

It lends two memfds of two blocks, one a tensor-parallel rank, presents the ticket, pushes block 1, filled with a pattern,
by ring unless told not to, and hands a record off. With "members" each rank has a connection of its own, as processes would. It prints one line of JSON when the lease has settled. It shows the
protocol; an engine would not wait in between.
"""
import ctypes
import fcntl
import json
import mmap
import os
import select
import socket
import struct
import sys

HEADER = struct.Struct("<4sBBHIIQ")  # magic, version, 0, type, length, flags, request id
EVENT = struct.Struct("<Q16sQIIIIHHI")  # lease, nonce, seq, tokens, first token, layouts, data, text, code, 0
HELLO, REGISTER_REGION, PRESENT, PUSH, HANDOFF, PING, SETUP_RING, REGISTER_DMABUF, EXTEND, JOIN, DESCRIBE = (
    0x01, 0x02, 0x04, 0x05, 0x06, 0x0A, 0x0C, 0x0D, 0x0E, 0x0F, 0x10)
ALL_LAYERS = 0xFFFFFFFF
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
        self.next_id, self.answers, self.events, self.draining, self.seen = 0, {}, [], False, 0
        name = engine_id.encode()
        request = self.send(HELLO, struct.pack("<HHIHHI", VERSION, VERSION, 0, len(name), 0, 0) + name)
        fixed = struct.Struct("<HHIQIIIIHHI")
        payload = self.answer(request, HELLO_OK)
        (self.version, _, self.pid, self.epoch, _, _, self.ping_ms, self.silence_ms, node, addr, _) = fixed.unpack_from(payload)
        text = payload[fixed.size :].decode()
        self.node_id, self.data_addr = text[:node], text[node : node + addr]

    def send(self, kind, payload, flags=0, fds=()):
        self.next_id += 1
        frame = HEADER.pack(b"HRU1", VERSION, 0, kind, len(payload), flags, self.next_id) + payload
        if not fds:
            self.sock.sendall(frame)
        else:  # descriptors travel with the first byte
            sent = socket.send_fds(self.sock, [frame], fds)
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
        self.seen += kind != GOODBYE
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
        return self.answer(self.send(REGISTER_REGION, struct.pack("<QII", size, 0, len(layout)) + layout, fds=[fd]))

    def register_dmabuf(self, fd, size, offset, address, layout):
        """Memory of a device, exported as a dma-buf: address is where this process has its first byte."""
        head = struct.pack("<QQQIHH", size, offset, address, 0, len(layout), 0)
        return self.answer(self.send(REGISTER_DMABUF, head + layout, fds=[fd]))

    def present(self, regions, ticket, peer, tokens, blocks, meta=b""):
        """The regions are those of a shard set, in order of rank; none are those of the members."""
        peer = peer.encode()
        head = struct.pack("<IIIHHHHI", tokens, len(blocks), len(meta), len(ticket), len(peer), len(regions), 0, 0)
        ids = struct.pack(f"<{len(regions)}Q{len(blocks)}I", *regions, *blocks)
        return self.answer(self.send(PRESENT, head + ids + ticket + peer + meta))

    def join(self, engine_id):
        """Makes this connection that of a rank of the engine, before anything is lent."""
        name = engine_id.encode()
        return self.answer(self.send(JOIN, struct.pack("<HHI", len(name), 0, 0) + name))

    def describe(self, about):
        doc = json.dumps(about).encode()
        return self.answer(self.send(DESCRIBE, struct.pack("<II", len(doc), 0) + doc))

    def extend(self, lease, blocks):
        """Blocks that were taken since: present may have said fewer than the tokens need."""
        return self.answer(self.send(EXTEND, struct.pack(f"<QII{len(blocks)}I", lease, len(blocks), 0, *blocks)))

    def push(self, lease, units, seq):
        """Units are (layer, first block, blocks, shard): shard 0 is all regions. Quiet: only a refusal is answered, and
        nobody waits for it here."""
        body = b"".join(struct.pack("<IIII", *u) for u in units)
        self.send(PUSH, struct.pack("<QQII", lease, seq, len(units), 0) + body, flags=QUIET)

    def handoff(self, lease, record):
        return self.answer(self.send(HANDOFF, struct.pack("<QII", lease, len(record), 0) + record))


class Ring:
    """Pushes without a message each. Python has no fences, so each push rings, and our own NEED_WAKEUP stays set."""

    HEAD = struct.Struct("<4sIII")
    SUBMISSION = struct.Struct("<HHIQQ")  # kind, ranges, 0, lease, seq
    COMPLETION = struct.Struct("<HHIQQ16s")  # kind, status, after, lease, seq, nonce
    SUB_HEAD, SUB_TAIL, COMP_HEAD, COMP_TAIL, FLAGS = 64, 128, 256, 320, 384
    FIRST, ENTRY = 4096, 64

    def __init__(self, daemon, submissions=8, completions=16):
        self.daemon, self.subs, self.comps, self.tail, self.head = daemon, submissions, completions, 0, 0
        fd, self.mem = memory(self.FIRST + self.ENTRY * (submissions + completions))
        self.mem[: self.HEAD.size] = self.HEAD.pack(b"HRR1", 1, submissions, completions)
        self.store(self.FLAGS, 1)
        self.theirs, self.ours = eventfd(), eventfd()
        sizes = struct.pack("<IIQ", submissions, completions, 0)
        daemon.answer(daemon.send(SETUP_RING, sizes, fds=[fd, self.theirs, self.ours]))
        os.close(fd)

    def load(self, at):
        return memoryview(self.mem)[at : at + 4].cast("I")[0]  # one aligned load

    def store(self, at, value):
        memoryview(self.mem)[at : at + 4].cast("I")[0] = value & 0xFFFFFFFF

    def push(self, lease, units, seq):
        """False: too long, or the queue is full: to be sent as a message."""
        if len(units) > 2 or (self.tail - self.load(self.SUB_HEAD)) & 0xFFFFFFFF >= self.subs:
            return False
        at = self.FIRST + self.ENTRY * (self.tail % self.subs)
        body = self.SUBMISSION.pack(1, len(units), 0, lease, seq) + b"".join(struct.pack("<IIII", *u) for u in units)
        self.mem[at : at + self.ENTRY] = body.ljust(self.ENTRY, b"\0")
        self.tail += 1
        self.store(self.SUB_TAIL, self.tail)
        os.write(self.theirs, struct.pack("<Q", 1))
        return True

    def completion(self):
        """Waits for the next one, in its place among the events."""
        while True:
            if self.load(self.COMP_TAIL) != self.head & 0xFFFFFFFF:
                at = self.FIRST + self.ENTRY * (self.subs + self.head % self.comps)
                _, status, after, lease, seq, nonce = self.COMPLETION.unpack_from(self.mem, at)
                if (self.daemon.seen - after) & 0xFFFFFFFF < 1 << 31:
                    self.head += 1
                    self.store(self.COMP_HEAD, self.head)
                    return {"status": status, "lease": lease, "seq": seq, "nonce": nonce}
            ready, _, _ = select.select([self.ours, self.daemon.sock], [], [], 20)
            if not ready:
                raise TimeoutError("no completion")
            if self.ours in ready:
                os.read(self.ours, 8)
            if self.daemon.sock in ready:
                self.daemon.pump()


def eventfd():
    if hasattr(os, "eventfd"):
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    return ctypes.CDLL(None, use_errno=True).eventfd(0, os.O_CLOEXEC | os.O_NONBLOCK)


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


TOKENS, HEAD_BYTES, BLOCKS = 16, 256, 2


def lend(daemon, rank):
    """One of two tensor-parallel ranks, of one head each. It gives the region, and how a false one is refused."""
    size = TOKENS * HEAD_BYTES * BLOCKS
    fd, mem = memory(size)
    mem[size // 2 :] = bytes((i * 7 + 3 + rank) & 0xFF for i in range(size // 2))
    ours = layout(BLOCKS, TOKENS, HEAD_BYTES, rank, 2)
    try:
        daemon.register_dmabuf(fd, size, 0, 0x7F0000000000, ours)
    except Refused as e:
        return daemon.register(fd, size, ours), str(e)
    raise ValueError("a memfd passed for a device's memory")


def push(pushers, lease, bound):
    """Block 1 of all layers, from each of the connections, with a ring or without."""
    for daemon, ring in pushers:
        if ring and ring.push(lease, [(ALL_LAYERS, 0, 1, 0)], 41):
            pushed = ring.completion()
            if pushed["status"] or pushed["nonce"] != bound["nonce"]:
                raise Refused(f"push: {pushed}")
        else:
            daemon.push(lease, [(ALL_LAYERS, 0, 1, 0)], 41)
            pushed = daemon.event(PUSHED)
    return pushed


def main(path, engine_id, peer, ticket, form="ring"):
    if form == "members":  # in any order, also before their engine
        ranks = [Daemon(path, f"{engine_id}/{rank}") for rank in range(2)]
        for rank in ranks:
            rank.join(engine_id)
        daemon = Daemon(path, engine_id)
    else:
        daemon = Daemon(path, engine_id)
        ranks = [daemon, daemon]
    lent = [lend(ranks[rank], rank) for rank in range(2)]
    daemon.describe({"engine": "python"})
    pushers = [(d, Ring(d) if form != "messages" else None) for d in dict.fromkeys(ranks)]
    regions = [] if form == "members" else [region for region, _ in lent]
    lease = daemon.present(regions, bytes.fromhex(ticket), peer, TOKENS, [], b"from python")
    daemon.extend(lease, [1])
    bound = daemon.event(BOUND)
    pushed = push(pushers, lease, bound)
    daemon.handoff(lease, b"record of python")
    daemon.event(SETTLED)
    daemon.answer(daemon.send(PING, struct.pack("<Q", 1)), PONG)
    print(json.dumps({"node": daemon.node_id, "seq": pushed["seq"], "refusal": lent[1][1], "first_token": bound["first_token"]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
