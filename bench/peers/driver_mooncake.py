"""Mooncake's transfer engine over TCP. Arguments: tcp BYTES."""

from importlib.metadata import version

import peer


class Engine:
    TRANSPORTS = ("tcp",)
    BATCH = 1024  # more at a time were refused for want of queue space

    def __init__(self, name, memory):
        from mooncake.engine import TransferEngine

        self.engine = TransferEngine()
        self.check(self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), "initialize")
        self.check(self.engine.register_memory(memory.ctypes.data, memory.nbytes), "register memory")
        self.base = memory.ctypes.data

    @staticmethod
    def check(status, what):
        if status != 0:
            raise RuntimeError(f"{what} gave {status}")

    def what(self):
        return f"Mooncake transfer engine {version('mooncake-transfer-engine-non-cuda')} over TCP, its defaults, at most {self.BATCH} blocks a request"

    def address(self):
        return f"127.0.0.1:{self.engine.get_rpc_port()}", self.base

    def connect(self, address):
        self.peer, self.remote = address

    def prepare(self, froms, tos, block):
        return (froms + self.base).tolist(), (tos + self.remote).tolist(), [block] * len(froms)

    def write(self, request):
        froms, tos, sizes = request
        if len(froms) == 1:
            self.check(self.engine.transfer_sync_write(self.peer, froms[0], tos[0], sizes[0]), "write")
        else:
            self.check(self.engine.batch_transfer_sync_write(self.peer, froms, tos, sizes), "batch write")

    def release(self, request):
        pass


peer.main(Engine)
