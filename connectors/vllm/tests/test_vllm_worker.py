"""A rank's half: what is pushed, and when."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.events import Event, LeaseRef, Pushed, PushRefused
from headrace.protocol import ALL_LAYERS, Code, Unit
from headrace.vllm.meta import Push, Step
from headrace.vllm.worker import LAYER_BYTES_MIN, Gate, Member

REF = LeaseRef(1, 7)


class Daemon:
    def __init__(self) -> None:
        self.ready = True
        self.pushed: list[tuple[LeaseRef, list[Unit]]] = []
        self.events: list[Event] = []

    def step(self) -> Sequence[Event]:
        events, self.events = self.events, []
        return events

    def push(self, ref: LeaseRef, units: Sequence[Unit]) -> int:
        self.pushed.append((ref, list(units)))
        return len(self.pushed)

    def close(self) -> None:
        self.ready = False


class Later:
    def __init__(self) -> None:
        self.open = False

    def passed(self) -> bool:
        return self.open

    def wait(self) -> None:
        self.open = True


class Rank:
    def __init__(self, *, block_bytes: int = 1, gates: list[Later] | None = None) -> None:
        self.daemon, self.now = Daemon(), 0.0
        self.said: list[str] = []

        def gate() -> Gate:
            assert gates is not None
            gates.append(Later())
            return gates[-1]

        self.member = Member(
            self.daemon,
            rank=0,
            layers=[["a"], ["b"], ["c"]],
            layer_block_bytes=block_bytes,
            gate=gate if gates is not None else None,
            log=lambda _level, text: self.said.append(text),
            arrive=lambda: self.said.append("arrived"),
            clock=lambda: self.now,
        )

    def step(self, *pushes: Push, layers: str = "abc") -> None:
        self.member.begin(Step(list(pushes)))
        for name in layers:
            self.member.layer(name)
        self.member.end()


def test_small_steps_push_all_layers_at_once() -> None:
    r = Rank()
    r.step(Push(REF, 2, 3))
    assert r.daemon.pushed == [(REF, [Unit(ALL_LAYERS, 2, 3)])]


def test_large_steps_push_layer_by_layer_and_the_rest_at_the_end() -> None:
    r = Rank(block_bytes=LAYER_BYTES_MIN)
    r.step(Push(REF, 0, 1), layers="aab")  # a twice: a layer that shares its cache; c is skipped, as under full CUDA graphs
    assert r.daemon.pushed == [(REF, [Unit(0, 0, 1)]), (REF, [Unit(1, 0, 1)]), (REF, [Unit(2, 0, 1)])]
    r.step(Push(REF, 1, 1), layers="")
    assert r.daemon.pushed[3:] == [(REF, [Unit(ALL_LAYERS, 1, 1)])]


def test_nothing_is_pushed_before_the_forward_pass_is_through() -> None:
    gates: list[Later] = []
    r = Rank(block_bytes=LAYER_BYTES_MIN, gates=gates)
    r.step(Push(REF, 0, 1))
    r.step(Push(REF, 1, 1))
    assert r.daemon.pushed == []
    gates[1].open = True
    r.step()
    assert r.daemon.pushed == [], "steps are through in order"
    gates[0].open = True
    r.step()
    assert [u[0].first for _, u in r.daemon.pushed] == [0, 1]


def test_what_arrived_is_made_visible_before_the_step_that_may_read_it() -> None:
    r = Rank()
    r.step()
    assert r.said == []
    r.member.begin(Step(arrived=True))
    assert r.said == ["arrived"]


def test_a_push_that_came_before_its_blocks_is_offered_again() -> None:
    r = Rank()
    r.step(Push(REF, 0, 1))
    r.daemon.events = [PushRefused(REF, 1, Code.INVALID, "beyond")]
    r.step()
    r.step()
    assert len(r.daemon.pushed) == 2
    assert r.member.answer(beat=False) is None
    r.daemon.events = [Pushed(REF, 2)]
    r.step()
    assert len(r.daemon.pushed) == 2


def test_a_push_that_stays_refused_is_told() -> None:
    r = Rank()
    r.step(Push(REF, 0, 1))
    r.now = 3.0
    r.daemon.events = [PushRefused(REF, 1, Code.INVALID, "beyond")]
    r.step()
    answer = r.member.answer(beat=False)
    assert answer is not None
    assert answer.refused == [(REF, "beyond")]
    assert r.member.answer(beat=False) is None, "once"


def test_a_push_behind_the_leases_end_is_no_news() -> None:
    r = Rank()
    r.step(Push(REF, 0, 1))
    r.daemon.events = [PushRefused(REF, 1, Code.LEASE_ENDED, "")]
    r.step()
    assert r.member.answer(beat=False) is None
    beat = r.member.answer(beat=True)
    assert beat is not None
    assert (beat.refused, beat.absent) == ([], {})


def test_a_rank_without_a_daemon_says_so_and_when_it_is_back() -> None:
    r = Rank()
    assert r.member.answer(beat=False) is None
    r.daemon.ready = False
    gone = r.member.answer(beat=False)
    assert gone is not None
    assert list(gone.absent) == [0]
    assert gone.absent[0]
    assert r.member.answer(beat=False) is None
    r.daemon.ready = True
    back = r.member.answer(beat=False)
    assert back is not None
    assert back.absent == {0: ""}
