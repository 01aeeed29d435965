"""What the drivers of other transfer engines share.

A driver stays and answers each line of JSON on stdin with one on stdout, the first one unasked when it is ready:

    (start)                                              {"what": "NAME VERSION, settings"}
    {"op": "verify", "block": N}                         {"verified_bytes": N}
    {"op": "move", "block": N, "batch": N, "bytes": N}   {"bytes": N, "seconds": S, "cpu_seconds": S}
    {"op": "latency", "block": N, "count": N}            {"micros": [...]}

or {"error": "..."}. It writes blocks scattered over its memory into a second process of its own, which has as much.
batch 0 means as many blocks a request as the engine does best with; otherwise requests of so many go one at a time.
Seconds are those of the writes alone: lists of descriptors are prepared outside of them. CPU seconds are both processes'.
"""

import base64
import ctypes
import json
import os
import pickle
import subprocess
import sys
import time

import numpy as np

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
FILL = 0xEE
WARM_UP = 50  # single writes before those that are timed: the caller stops drivers between their turns


def cpu_seconds(pids):
    """CPU time of processes, from their clocks: finer than the ticks of /proc."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def die_with_parent():
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


def source(size):
    words = np.arange(size // 8, dtype=np.uint64)
    words *= MULTIPLIER
    return words.view(np.uint8)


def order(size, block, seed):
    """The offsets of all blocks, in an order of its own for each seed."""
    return np.random.default_rng(seed).permutation(size // block).astype(np.int64) * block


def target(make, size):
    """The process that is written to. It answers one line with another too."""
    out = quiet_stdout()
    memory = np.full(size, FILL, np.uint8)
    engine = make("target", memory)
    print(base64.b64encode(pickle.dumps(engine.address())).decode(), file=out, flush=True)
    expected = None
    for line in sys.stdin:
        block = int(line)
        if block == 0:
            memory[:] = FILL
            print("true", file=out, flush=True)
            continue
        if expected is None:
            expected = source(size)
        pairs = zip(order(size, block, 1), order(size, block, 2))
        same = all(np.array_equal(expected[a : a + block], memory[b : b + block]) for a, b in pairs)
        print(json.dumps(same), file=out, flush=True)
    os._exit(0)  # the engines' threads do not end by themselves


def quiet_stdout():
    """stdout for answers alone: libraries write to it too."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


class Driver:
    def __init__(self, make, size):
        self.size = size
        argv = [sys.executable, *sys.argv, "target"]
        self.child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent)
        answer = self.child.stdout.readline()
        if not answer:
            raise RuntimeError("the target process did not start")
        address = pickle.loads(base64.b64decode(answer))
        self.memory = source(size)
        self.engine = make("driver", self.memory)
        self.engine.connect(address)
        self.pids = [os.getpid(), self.child.pid]

    def ask_target(self, line):
        self.child.stdin.write(f"{line}\n")
        self.child.stdin.flush()
        answer = self.child.stdout.readline()
        if not answer:
            raise RuntimeError("the target process has died")
        return json.loads(answer)

    def requests(self, block, batch, count):
        """Prepared requests for the first count blocks of the order, again and again."""
        batch = batch or self.engine.BATCH or count
        froms, tos = order(self.size, block, 1), order(self.size, block, 2)
        prepared = []
        for first in range(0, count, batch):
            at = np.arange(first, min(first + batch, count)) % len(froms)
            prepared.append(self.engine.prepare(froms[at], tos[at], block))
        return prepared

    def verify(self, block):
        self.ask_target(0)
        for r in self.requests(block, 0, self.size // block):
            self.engine.write(r)
            self.engine.release(r)
        if not self.ask_target(block):
            raise RuntimeError("blocks arrived altered")
        return {"verified_bytes": self.size // block * block}

    def move(self, block, batch, bytes):
        self.warm(block, 3)
        count = max(bytes // block, 1)
        prepared = self.requests(block, batch, count)
        cpu, start = cpu_seconds(self.pids), time.perf_counter()
        for r in prepared:
            self.engine.write(r)
        seconds, cpu = time.perf_counter() - start, cpu_seconds(self.pids) - cpu
        for r in prepared:
            self.engine.release(r)
        return {"bytes": count * block, "seconds": seconds, "cpu_seconds": cpu}

    def warm(self, block, count):
        for r in self.requests(block, 1, count):
            self.engine.write(r)
            self.engine.release(r)

    def latency(self, block, count):
        self.warm(block, WARM_UP)
        prepared = self.requests(block, 1, count)
        micros = []
        for r in prepared:
            start = time.perf_counter()
            self.engine.write(r)
            micros.append(round((time.perf_counter() - start) * 1e6, 2))
        for r in prepared:
            self.engine.release(r)
        return {"micros": micros}


def main(make):
    """make(name, memory) gives an engine that has lent memory: address, connect, prepare, write, release and BATCH.
    make.TRANSPORTS are those it can do.

    The arguments of a driver are the transport, tcp or shm, and the size of the memory.
    """
    size = int(sys.argv[2])
    if sys.argv[3:] == ["target"]:
        target(make, size)
    out = quiet_stdout()

    def answer(value):
        print(json.dumps(value), file=out, flush=True)

    if sys.argv[1] not in make.TRANSPORTS:
        answer({"error": f"it moves blocks over {' and '.join(make.TRANSPORTS)} only"})
        os._exit(0)
    try:
        driver = Driver(make, size)
    except Exception as failure:
        answer({"error": f"start: {failure}"})
        os._exit(1)
    answer({"what": driver.engine.what()})
    for line in sys.stdin:
        call = json.loads(line)
        op = call.pop("op")
        try:
            answer({"verify": driver.verify, "move": driver.move, "latency": driver.latency}[op](**call))
        except Exception as failure:
            answer({"error": f"{op}: {failure}"})
    driver.child.kill()
    os._exit(0)
