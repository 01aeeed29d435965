"""Asks a publisher of KV events for all it has and prints what they come to, as JSON: {"next": N, "removed": N, "have": {"KEY": BLOCKS}}.

usage: tally.py REPLAY_PORT
It shares no code with the collector that it is compared with.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import msgspec
import zmq


def main() -> None:
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)  # when nobody answers
    dealer.connect(f"tcp://127.0.0.1:{sys.argv[1]}")
    dealer.send_multipart([b"", bytes(8)])
    have: Counter[int] = Counter()
    following = removed = 0
    while True:
        if not dealer.poll(20_000):
            sys.exit("no answer to a replay")
        *_, seq, payload = dealer.recv_multipart()
        if seq == b"\xff" * 8:
            break
        if int.from_bytes(seq, "big") != following:
            sys.exit(f"batch {following} is missing")
        following += 1
        for event in msgspec.msgpack.decode(payload)[1]:
            match event["type"]:
                case "BlockStored":
                    have.update(event["block_hashes"])
                case "BlockRemoved":
                    have.subtract(event["block_hashes"])
                    removed += len(event["block_hashes"])
                case "AllBlocksCleared":
                    have.clear()
    print(json.dumps({"next": following, "removed": removed, "have": {str(k): n for k, n in have.items() if n}}))


main()
