"""The scheduler's half against a daemon that does anything at any time."""

from __future__ import annotations

import random

import pytest

from headrace.events import Lease
from headrace.vllm.params import Offer
from tests.vllm_sim import BLOCK, Engine, ticket


@pytest.mark.parametrize("seed", range(400))
def test_any_order_of_events(seed: int) -> None:
    rng = random.Random(seed)
    windows = rng.choice([(None,), (None,), (None, BLOCK + 1), (None, 2 * BLOCK, 2 * BLOCK), (3,)])
    e = Engine(rng, blocks=rng.choice([16, 40, 200]) * len(windows), windows=windows)
    n = 0
    for _ in range(rng.randint(20, 120)):
        match rng.randrange(12):
            case 0 | 1:
                n += 1
                e.add(rng.choice(["prefill", "decode"]), n, rng.randint(1, 5 * BLOCK))
            case 2:  # another request with the same ticket, as n > 1 makes them
                decodes = [r for r in e.reqs.values() if r.role == "decode"]
                if decodes:
                    twin = rng.choice(decodes)
                    e.add("decode", twin.n, twin.prompt)
            case 3 | 4:  # P offers: for a request that is there, or before it comes, or another prompt
                decodes = [r for r in e.reqs.values() if r.role == "decode"]
                if decodes and rng.random() < 0.8:
                    r = rng.choice(decodes)
                    e.offer(r.n, r.prompt, None if rng.random() < 0.9 else e.prompt(r.n + 1, r.prompt))
                else:
                    e.offer(n + 1, 3)
            case 5:
                e.abort_one()
            case 6 if rng.random() < 0.2:
                e.daemon.die()
            case 6 if rng.random() < 0.2:
                e.daemon.stopped = True
            case 7:
                e.daemon.ready, e.daemon.stopped = True, False
            case 8 if rng.random() < 0.3:
                e.daemon.withdraw()
            case _:
                e.daemon.do()
        e.clock.now += rng.choice([0.0, 0.001, 0.5])
        e.step(preempt=rng.random() < 0.1)
    settle(e)


def settle(e: Engine) -> None:
    """The deadlines pass; then nothing may be waiting, and when the daemon has said all, every block must be back."""
    e.daemon.ready = True
    for i in range(400):
        if i == 100:
            e.clock.now += 63
            e.daemon.expire()
        e.daemon.do()
        e.step()
        if all(r.status == "gone" for r in e.reqs.values()):
            break
        if i > 300 and not e.daemon.living:  # a pool too small for two at once: vLLM would preempt, here one goes
            e.abort_one()
    assert {r.name: r.status for r in e.reqs.values() if r.status != "gone"} == {}
    e.daemon.stopped = False
    e.step()
    assert e.kept == []
    assert sorted(e.pool) == list(range(1, e.total + 1))
    assert len(e.control.sends) == 0
    assert len(e.control.loads) == 0
    assert not e.control.waiting
    for lease in e.daemon.living.values():
        pytest.fail(f"{lease} lives on")


def engine() -> Engine:
    return Engine(random.Random(1))


def only(e: Engine) -> Lease:
    leases: list[Lease] = list(e.daemon.living.values())
    assert len(leases) == 1
    return leases[0]


def test_decode_waits_for_its_offer_and_no_longer_than_it_must() -> None:
    e = engine()
    c = e.control
    r = e.add("decode", 1, 10)
    assert c.matched(r.name, 0, False) is None
    e.offer(1, 10)
    assert c.matched(r.name, 4, False) == 6
    late = e.add("decode", 2, 10)
    assert c.matched(late.name, 0, False) is None
    e.clock.now += 20.1
    assert c.matched(late.name, 0, False) == 0
    assert ticket(2)[8:24] in e.daemon.used, "P is told that its KV is not wanted"
    assert c.tally.totals["failed"] == 1


def test_a_stopped_daemon_holds_blocks_but_no_request() -> None:
    e = engine()
    r = e.add("decode", 1, 10)
    e.offer(1, 10)
    e.step()
    assert r.status in ("waiting", "remote")
    while r.status == "waiting":
        e.step()
    e.daemon.stopped = True
    for _ in range(5):
        e.step()
    assert r.status == "remote"
    e.clock.now += 63
    e.step()
    e.step()
    assert (r.status, r.loaded) != ("remote", True)
    while r.status != "gone":
        e.step()
    assert len(e.pool) == e.total - 3, "the daemon may still write there"
    e.daemon.stopped = False
    e.daemon.die()
    e.step()
    assert len(e.pool) == e.total


def test_decode_takes_no_kv_of_another_prompt() -> None:
    e = engine()
    r = e.add("decode", 1, 10)
    e.daemon.offer(1, 10, Offer(10, b"x" * 32).encode())
    assert e.control.matched(r.name, 0, False) == 0
    assert e.daemon.presented == {}


@pytest.mark.parametrize(
    "meta", [b"", b"{}", b"[]", b'{"v":2,"prompt_tokens":10,"prompt":"00"}', b'{"v":1,"prompt_tokens":"x","prompt":"00"}', b"\xff"]
)
def test_decode_takes_no_meta_it_does_not_understand(meta: bytes) -> None:
    e = engine()
    r = e.add("decode", 1, 10)
    e.daemon.offer(1, 10, meta)
    assert e.control.matched(r.name, 0, False) == 0


def test_decode_goes_alone_when_the_daemon_stays_away() -> None:
    e = engine()
    e.daemon.ready = False
    r = e.add("decode", 1, 10)
    assert e.control.matched(r.name, 0, False) is None
    e.clock.now += 1.1
    assert e.control.matched(r.name, 0, False) == 0


def test_decode_that_wants_all_logprobs_computes_itself() -> None:
    e = engine()
    r = e.add("decode", 1, 10)
    e.offer(1, 10)
    assert e.control.matched(r.name, 0, True) == 0
    assert ticket(1)[8:24] in e.daemon.used


def test_prefix_hit_leaves_nothing_to_load() -> None:
    e = engine()
    r = e.add("decode", 1, 9)
    assert e.control.matched(r.name, 8, False) == 0, "vLLM computes the last token itself in any case"


def test_prefill_pushes_chunk_by_chunk_and_holds_until_settled() -> None:
    e = engine()
    c = e.control
    r = e.add("prefill", 1, 10)
    c.allocated(r.name, 0, [[7, 8]], 10, lambda: e.prompt(1, 10))
    c.sends.advance(r.name, 6, lambda: [[7, 8]])
    e.daemon._onwards(only(e))
    (push,) = c.step().pushes
    assert (push.first, push.count) == (0, 1), "the second block is not full"
    c.sends.advance(r.name, 10, lambda: [[7, 8, 9, 10]])  # one more than the prompt needs: lookahead
    (push,) = c.step().pushes
    assert (push.first, push.count) == (1, 2)
    assert only(e).blocks == [7, 8, 9]
    assert c.finished(r.name, False) == (True, {"headrace": {"v": 1, "state": "handed", "reason": ""}})
    assert c.waiting
    lease = only(e)
    e.daemon.pushed[lease.nonce] = {0, 1, 2}
    lease.bound = True
    e.daemon._onwards(lease)
    assert c.answered(None, ()) == ({r.name}, set())
    assert not c.waiting


def test_prefill_with_tokens_to_come_sends_whole_blocks_only() -> None:
    e = engine()
    r = e.add("prefill", 1, 10)
    e.control.allocated(r.name, 0, [[1, 2, 3]], 8, lambda: e.prompt(1, 10))
    e.control.sends.advance(r.name, 10, lambda: [[1, 2, 3]])
    assert only(e).blocks == [1, 2]
    assert only(e).nonce in e.daemon.record


def test_successor_gets_everything_from_the_start() -> None:
    e = engine()
    c = e.control
    r = e.add("prefill", 1, 8)
    c.allocated(r.name, 0, [[1, 2]], 8, lambda: e.prompt(1, 8))
    c.sends.advance(r.name, 8, lambda: [[1, 2]])
    lease = only(e)
    e.daemon._onwards(lease)
    assert [(p.first, p.count) for p in c.step().pushes] == [(0, 2)]
    assert c.step().pushes == []
    assert lease.ref is not None
    lease.ref = type(lease.ref)(2, 77)
    assert [(p.ref.id, p.first, p.count) for p in c.step().pushes] == [(77, 0, 2)]


def test_preemption_waits_for_the_fence() -> None:
    e = engine()
    c = e.control
    r = e.add("prefill", 1, 8)
    c.allocated(r.name, 0, [[1, 2]], 8, lambda: e.prompt(1, 8))
    lease = only(e)
    c.preempted([r.name])
    assert lease.over
    c.sends.advance(r.name, 8, lambda: [[5, 6]])
    assert c.step().pushes == []
    assert c.finished(r.name, False)[0] is False


@pytest.mark.parametrize(
    "part",
    [
        {"v": 2},
        {"v": 1, "role": "both"},
        {"v": 1, "role": "decode", "ticket": "?"},
        {"v": 1, "role": "decode", "ticket": "AAAA", "deadline_ms": 1},
        {"v": 1, "role": "decode"},
        7,
    ],
)
def test_params_that_are_not_understood_do_no_harm(part: object) -> None:
    e = engine()
    e.control.added("r", {"headrace": part}, lambda: e.prompt(1, 1))
    assert e.control.matched("r", 0, False) == 0
    assert e.control.finished("r", True) == (False, None)
    assert e.control.tally.totals["failed"] == 1
