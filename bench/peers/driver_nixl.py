"""NIXL with its UCX backend, over TCP or over shared memory. Arguments: tcp|shm BYTES."""

import os
import sys
from importlib.metadata import version

TRANSPORT = sys.argv[1]
if TRANSPORT == "tcp":
    os.environ.update(UCX_TLS="tcp,self", UCX_NET_DEVICES="lo")
else:
    os.environ.update(UCX_TLS="sm,self")

import numpy as np  # noqa: E402
import peer  # noqa: E402


class Engine:
    TRANSPORTS = ("tcp", "shm")
    BATCH = 0  # one request for all blocks

    def __init__(self, name, memory):
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(name, nixl_agent_config(backends=[]))
        # UCX's shared memory has no way to tell that a peer failed and refuses to be asked for one.
        self.agent.create_backend("UCX", {} if TRANSPORT == "tcp" else {"ucx_error_handling_mode": "none"})
        self.registered = self.agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        self.base = memory.ctypes.data

    def what(self):
        way = "TCP" if TRANSPORT == "tcp" else "shared memory"
        return f"NIXL {version('nixl-cu12')} with UCX over {way}, one prepared request at a time, polled by the caller"

    def address(self):
        return self.agent.get_agent_metadata(), self.base

    def connect(self, address):
        metadata, self.remote = address
        name = self.agent.add_remote_agent(metadata)
        self.peer = name.decode() if isinstance(name, bytes) else name

    def prepare(self, froms, tos, block):
        def descriptors(offsets, base):
            table = np.zeros((len(offsets), 3), np.uint64)
            table[:, 0] = offsets + base
            table[:, 1] = block
            return self.agent.get_xfer_descs(table, "DRAM")

        return self.agent.initialize_xfer("WRITE", descriptors(froms, self.base), descriptors(tos, self.remote), self.peer)

    def write(self, request):
        state = self.agent.transfer(request)
        while state == "PROC":
            state = self.agent.check_xfer_state(request)
        if state != "DONE":
            raise RuntimeError(f"transfer ended as {state}")

    def release(self, request):
        self.agent.release_xfer_handle(request)


peer.main(Engine)
