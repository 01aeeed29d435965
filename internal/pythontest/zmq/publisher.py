"""A publisher of KV events over libzmq, as vLLM's: PUB, and ROUTER for replay. It does what standard input says.

usage: publisher.py PUB_PORT REPLAY_PORT BUFFER
Each line is a JSON object: {"batches": [[event, ...], ...], "mute": bool}. mute: they go into the buffer alone, as if they were
lost on their way. "ok SEQ" answers each. Standard input's end is its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque

import msgspec
import zmq

END = b"\xff" * 8


def answer(replay: zmq.Socket[bytes], buffer: deque[tuple[int, bytes]]) -> None:
    client, _, start = replay.recv_multipart()
    for seq, payload in buffer:
        if seq >= int.from_bytes(start, "big"):
            replay.send_multipart((client, b"", b"kv-events", seq.to_bytes(8, "big"), payload))
    replay.send_multipart((client, b"", b"", END, b""))


def main() -> None:
    pub_port, replay_port, size = map(int, sys.argv[1:])
    context = zmq.Context()
    pub = context.socket(zmq.PUB)
    pub.set_hwm(100_000)
    replay = context.socket(zmq.ROUTER)
    pub.bind(f"tcp://127.0.0.1:{pub_port}")
    replay.bind(f"tcp://127.0.0.1:{replay_port}")
    buffer: deque[tuple[int, bytes]] = deque(maxlen=size)
    encode = msgspec.msgpack.Encoder().encode
    poller = zmq.Poller()
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    poller.register(replay, zmq.POLLIN)
    print("ok 0", flush=True)
    seq = 0
    while True:
        ready = dict(poller.poll())
        if replay in ready:
            answer(replay, buffer)
        if sys.stdin.fileno() in ready:
            line = sys.stdin.buffer.readline()
            if not line:
                return
            order = json.loads(line)
            for events in order["batches"]:
                payload = encode([time.time(), events, 0])
                if not order["mute"]:
                    pub.send_multipart((b"kv-events", seq.to_bytes(8, "big"), payload))
                buffer.append((seq, payload))
                seq += 1
            print(f"ok {seq}", flush=True)


main()
