from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.client import Client
from tests.nodes import Memory, Node, Steps


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    """Two daemons, P's and D's."""
    if not os.environ.get("HEADRACE_BIN"):
        pytest.skip("HEADRACE_BIN is not set: run make pytest")
    made: list[Node] = []
    try:
        for name in ("node-p", "node-d"):
            made.append(Node(tmp_path, name, "--transport", "tcp"))
        yield made[0], made[1]
    finally:
        for n in made:
            n.stop()


class Pair:
    """An engine that prefills and one that decodes, each at its daemon, with a cache each."""

    def __init__(self, nodes: tuple[Node, Node], *, ring: bool, blocks: int = 8) -> None:
        self.node_p, self.node_d = nodes
        self.mem_p, self.mem_d = Memory(blocks), Memory(blocks)
        self.p = Client(self.node_p.socket, "p", ring=ring)
        self.d = Client(self.node_d.socket, "d", ring=ring)
        for client, mem in ((self.p, self.mem_p), (self.d, self.mem_d)):
            client.lend(mem.fd, mem.size, mem.layout)
            client.wait_ready()
        self.steps = Steps([self.p, self.d])
        self.steps.once()
        for heard in self.steps.heard.values():
            heard.clear()

    @property
    def peer(self) -> str:
        return self.d.address

    def close(self) -> None:
        for x in (self.p, self.d, self.mem_p, self.mem_d):
            x.close()


@pytest.fixture(params=["ring", "messages"])
def pair(request: pytest.FixtureRequest, nodes: tuple[Node, Node]) -> Iterator[Pair]:
    made = Pair(nodes, ring=request.param == "ring")
    before = len(os.listdir("/proc/self/fd"))
    yield made
    made.close()
    assert len(os.listdir("/proc/self/fd")) <= before, "descriptors are left over"
