"""Both halves of the connector, of a prefill and of a decode, with two daemons between them: everything but vLLM."""

from __future__ import annotations

import base64
import select
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from headrace.client import Client
from headrace.vllm import loads
from headrace.vllm.control import Control
from headrace.vllm.groups import Groups
from headrace.vllm.meta import Step
from headrace.vllm.params import Offer, digest
from headrace.vllm.worker import Member
from tests.nodes import ABSENT, BLOCK_TOKENS, ENDED, IDLE, LIMIT_S, LIVING, LOOK, REMEMBERED, Memory, Node, recall, ticket
from tests.vllm_sim import windowed

PROMPT = Offer(40, digest(range(40), []))


class Half:
    """One engine: its control, one rank, and its cache."""

    def __init__(self, node: Node, name: str) -> None:
        self.memory = Memory(8)
        self.client = Client(node.socket, name, ring=False)
        member = Client(node.socket, f"{name}/0", join=name)
        member.lend(self.memory.fd, self.memory.size, self.memory.layout)
        member.wait_ready()
        self.client.wait_ready()
        self.said: list[str] = []

        def log(_level: str, text: str) -> None:
            self.said.append(text)

        self.control = Control(self.client, block_tokens=BLOCK_TOKENS, block_bytes=self.memory.block_bytes, log=log)
        self.member = Member(member, rank=0, layers=[["layer"]], layer_block_bytes=self.memory.block_bytes, gate=None, log=log)
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[str] = set()

    def step(self, work: Callable[[], None] = lambda: None) -> Step:
        """A step of the engine; work is its forward pass."""
        step = self.control.step()
        self.member.begin(step)
        work()
        self.member.layer("layer")
        self.member.end()
        sent, received = self.control.answered(self.member.answer(step.beat), step.failed)
        self.sent |= sent
        self.received |= received
        self.failed |= set(step.failed)
        return step

    def close(self) -> None:
        self.control.close()
        self.member.close()
        self.memory.close()


class Pair:
    def __init__(self, nodes: tuple[Node, Node]) -> None:
        self.node_p, self.node_d = nodes
        self.p, self.d = Half(nodes[0], "p"), Half(nodes[1], "d")

    def ask(self, role: str, raw: bytes) -> dict[str, object]:
        part = {"v": 1, "role": role, "ticket": base64.b64encode(raw).decode(), "deadline_ms": int((time.time() + 60) * 1000)}
        return {"headrace": part | ({"peer": self.d.client.address} if role == "prefill" else {})}

    def begin(self) -> bytes:
        """Both legs at once."""
        raw = ticket(self.node_p, self.node_d)
        self.p.control.added("rp", self.ask("prefill", raw), lambda: PROMPT)
        self.d.control.added("rd", self.ask("decode", raw), lambda: PROMPT)
        return raw

    def until(self, condition: Callable[[], object]) -> None:
        limit = time.monotonic() + LIMIT_S
        while not condition():
            self.p.step()
            self.d.step()
            assert time.monotonic() < limit, (self.p.said, self.d.said)
            select.select([], [], [], 0.0005)

    def prefill(self, blocks: list[int], computed: int) -> None:
        """A step of P that computes so much of the prompt."""
        whole = computed // BLOCK_TOKENS if computed < PROMPT.prompt_tokens else len(blocks)
        self.p.control.sends.advance("rp", computed, lambda: [blocks])

        def forward() -> None:
            for b in blocks[:whole]:
                self.p.memory.fill(b, 1)

        self.p.step(forward)

    def close(self) -> None:
        self.p.close()
        self.d.close()


@pytest.fixture
def pair(nodes: tuple[Node, Node]) -> Iterator[Pair]:
    made = Pair(nodes)
    yield made
    made.close()


def test_chunks_go_while_the_prompt_is_computed_and_the_decode_gets_what_it_lacks(pair: Pair) -> None:
    pair.begin()
    d, p = pair.d, pair.p
    p.control.allocated("rp", 0, [[5, 2]], 40, lambda: PROMPT)
    pair.prefill([5, 2], 20)
    got: list[int | None] = []

    def offered() -> bool:
        got.append(d.control.matched("rd", BLOCK_TOKENS, False))
        return got[-1] is not None

    pair.until(offered)
    assert got[-1] == 40 - BLOCK_TOKENS
    d.control.allocated("rd", 40 - BLOCK_TOKENS, [[1, 3, 4]], 40, lambda: PROMPT)
    pair.prefill([5, 2, 7], 40)
    assert p.control.finished("rp", False)[0]
    pair.until(lambda: d.received and p.sent)
    assert d.memory.block(1) == bytes(d.memory.block_bytes), "it is there already, and not sent"
    assert d.memory.block(3) == p.memory.block(2)
    assert d.memory.block(4)[: 8 * 256] == p.memory.block(7)[: 8 * 256]
    assert (p.sent, d.received, d.failed) == ({"rp"}, {"rd"}, set())


class Kept:
    """References to blocks, as vLLM's pool counts them."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def keep(self, blocks: Sequence[int]) -> None:
        self.blocks += blocks

    def release(self, blocks: Sequence[int]) -> None:
        for b in blocks:
            self.blocks.remove(b)


def fill(memory: Memory, *blocks: int) -> None:
    for b in blocks:
        memory.fill(b, 1)


def test_a_windows_blocks_go_beside_those_of_all_tokens(pair: Pair) -> None:
    """39 of 40 tokens: three blocks of the first group, and of the second those from where the window begins, in token 23."""
    d, p = pair.d, pair.p
    kept = Kept()
    for half in (p, d):
        half.control.manage(Groups(BLOCK_TOKENS, (None, windowed(BLOCK_TOKENS + 1))), kept)
    pair.begin()
    p.control.allocated("rp", 0, [[5, 2], [6, 3]], 40, lambda: PROMPT)
    assert kept.blocks == [3]
    p.control.sends.advance("rp", 20, lambda: [[5, 2], [6, 3]])
    p.step(partial(fill, p.memory, 5, 6))
    got: list[int | None] = []

    def offered() -> bool:
        got.append(d.control.matched("rd", BLOCK_TOKENS, False))
        return got[-1] is not None

    pair.until(offered)
    assert got[-1] == 39 - BLOCK_TOKENS
    d.control.allocated("rd", 39 - BLOCK_TOKENS, [[1, 3, 4], [0, 5, 6]], 40, lambda: PROMPT)
    p.control.sends.advance("rp", 40, lambda: [[5, 2, 7], [0, 3, 1]])
    p.step(partial(fill, p.memory, 2, 3, 7, 1))
    assert kept.blocks == [3, 1]
    assert p.control.finished("rp", False)[0]
    pair.until(lambda: d.received and p.sent)
    assert d.memory.block(1) == bytes(d.memory.block_bytes), "it is there already, and not sent"
    assert [d.memory.block(b) for b in (3, 4, 5, 6)] == [p.memory.block(b) for b in (2, 7, 3, 1)]
    assert (p.sent, d.received, d.failed, kept.blocks) == ({"rp"}, {"rd"}, set(), [])


def test_an_aborted_prefill_frees_both_sides(pair: Pair) -> None:
    pair.begin()
    d, p = pair.d, pair.p
    p.control.allocated("rp", 0, [[5, 2]], 40, lambda: PROMPT)
    pair.until(lambda: d.control.loads._offers)
    assert d.control.matched("rd", 0, False) == 40
    d.control.allocated("rd", 40, [[1, 3, 4]], 40, lambda: PROMPT)
    hold, _ = p.control.finished("rp", True)
    pair.until(lambda: d.failed and (p.sent or not hold))
    assert d.received == set()
    assert d.control.matched("rd", 0, False) == 0


def test_an_aborted_decode_frees_both_sides(pair: Pair) -> None:
    pair.begin()
    d, p = pair.d, pair.p
    p.control.allocated("rp", 0, [[5, 2, 7]], 40, lambda: PROMPT)
    pair.prefill([5, 2, 7], 40)
    assert p.control.finished("rp", False)[0]
    assert d.control.finished("rd", True) == (False, None), "nothing was bound"
    pair.until(lambda: p.sent)


def test_a_killed_daemon_fails_the_load_when_its_process_is_gone(pair: Pair) -> None:
    pair.begin()
    d, p = pair.d, pair.p
    p.control.allocated("rp", 0, [[5, 2]], 40, lambda: PROMPT)
    pair.until(lambda: d.control.loads._offers)
    assert d.control.matched("rd", 0, False) == 40
    d.control.allocated("rd", 40, [[1, 3, 4]], 40, lambda: PROMPT)
    pair.d.step()
    pair.node_d.kill()
    pair.until(lambda: d.failed)
    p.control.finished("rp", True)
    pair.until(lambda: not p.control.waiting)
    assert any("did not arrive" in text for text in d.said)


def state(answer: dict[str, object] | None) -> object:
    """What a prefill says of its lease in its answer."""
    assert answer is not None
    said = answer["headrace"]
    assert isinstance(said, dict)
    return said["state"]


def test_a_decode_goes_on_alone_when_the_router_finds_that_nobody_presents(pair: Pair) -> None:
    raw = pair.begin()
    d, p = pair.d, pair.p
    assert d.control.matched("rd", 0, False) is None
    assert recall(p.client.address, LOOK, raw) == [ABSENT]
    pair.node_p.kill()  # before the prefill had anything to do with it
    p.control.allocated("rp", 0, [[5, 2, 7]], 40, lambda: PROMPT)
    pair.prefill([5, 2, 7], 40)
    hold, answer = p.control.finished("rp", False)
    assert not hold or state(answer) != "handed"
    assert recall(d.client.address, IDLE, raw) == [REMEMBERED]
    pair.until(lambda: d.control.matched("rd", 0, False) == 0)
    assert any("nobody presented it" in text for text in d.said)


def test_a_check_leaves_alone_what_is_presented(pair: Pair) -> None:
    raw = pair.begin()
    d, p = pair.d, pair.p
    p.control.allocated("rp", 0, [[5, 2, 7]], 40, lambda: PROMPT)
    pair.prefill([5, 2, 7], 40)
    hold, answer = p.control.finished("rp", False)
    assert hold
    assert state(answer) == "handed"
    pair.until(lambda: d.control.loads._offers)
    assert recall(p.client.address, LOOK, raw) == [LIVING]
    assert recall(d.client.address, IDLE, raw) == [LIVING]
    assert d.control.matched("rd", 0, False) == 40
    d.control.allocated("rd", 40, [[1, 3, 4]], 40, lambda: PROMPT)
    pair.until(lambda: d.received and p.sent)
    assert recall(p.client.address, LOOK, raw) == [ABSENT]
    assert recall(d.client.address, IDLE, raw) == [ENDED], "D's engine hears of that behind SETTLED"
    pair.d.step()
    assert (d.received, d.failed, d.said) == ({"rd"}, set(), d.said)


def test_a_check_finds_a_decode_whose_daemon_was_killed_and_came_back(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "AGAIN_S_MAX", 1000.0)  # it would help itself some time
    raw = pair.begin()
    d, p = pair.d, pair.p
    assert d.control.matched("rd", 0, False) is None
    pair.node_d.kill()
    p.control.allocated("rp", 0, [[5, 2, 7]], 40, lambda: PROMPT)
    pair.prefill([5, 2, 7], 40)  # nobody listens where it is to be presented
    p.control.finished("rp", False)
    limit = time.monotonic() + LIMIT_S
    while recall(p.client.address, LOOK, raw) == [LIVING]:
        assert time.monotonic() < limit
    d.step()
    pair.node_d.start()
    pair.until(lambda: d.client.ready)
    assert d.control.matched("rd", 0, False) is None
    assert recall(d.client.address, IDLE, raw) == [REMEMBERED]
    pair.until(lambda: d.control.matched("rd", 0, False) == 0)
    assert any("nobody presented it" in text for text in d.said)


def test_a_decode_does_not_wait_long_for_what_a_lost_daemon_may_have_known(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "AGAIN_S_MAX", 0.3)
    pair.begin()
    d = pair.d
    assert d.control.matched("rd", 0, False) is None
    pair.node_d.kill()
    pair.until(lambda: not d.client.ready)
    pair.node_d.start()
    pair.until(lambda: d.client.ready)
    pair.until(lambda: d.control.matched("rd", 0, False) == 0)
    assert any("the node daemon was lost" in text for text in d.said), d.said
