"""Hybrid caches: a prefill's and a decode's blocks as vLLM's own cache manager gives and takes them, with the bytes accounted for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.events import Lease
from headrace.vllm.control import Control
from headrace.vllm.groups import Dropped, Groups
from headrace.vllm.params import Offer, digest
from tests.vllm_sim import BLOCK, Clock, Daemon, params, ticket, windowed

TOTAL = 400  # blocks of a pool
CONTEXT = 1024
MODELS: dict[str, Sequence[Any]] = {
    "full and window": [None, ("window", 9)],
    "window of whole blocks": [None, ("window", 2 * BLOCK), ("window", 2 * BLOCK)],
    "window of one more": [("window", 2 * BLOCK + 1), None],
    "long window": [None, ("window", 50), ("window", 50)],
    "window alone": [("window", 3 * BLOCK)],
    "chunks": [None, ("chunk", 3 * BLOCK)],
    "full alone": [None],
}


def test_lists_by_place_in_the_prompt() -> None:
    g = Groups(BLOCK, (None, windowed(BLOCK + 1)))
    plan = g.plan(g.most(15, 15))
    assert (plan.tokens, plan.blocks, plan.firsts) == (14, 4, (0, 2))
    assert plan.pick([[1, 2, 3, 4], [0, 0, 5, 6]], 0, 4) == [1, 2, 3, 5, 4, 6]
    assert plan.pick([[1, 2, 3, 4], [0, 0, 5, 6]], 2, 4, moving=True) == [5, 6]
    assert [plan.below(i) for i in range(6)] == [0, 1, 2, 4, 6, 6]
    assert (plan.count, plan.lease_tokens) == (6, 24)
    with pytest.raises(Dropped, match="no block 2 of group 1"):
        plan.pick([[1, 2, 3, 4], [0, 0, 0, 6]], 0, 4)
    with pytest.raises(Dropped, match="blocks of 1 groups"):
        plan.pick([[1, 2, 3, 4]], 0, 4)


def test_one_group_is_as_it_lies() -> None:
    g = Groups(BLOCK)
    plan = g.plan(g.most(15, 15))
    assert (plan.tokens, plan.lease_tokens, plan.count) == (15, 15, 4)
    assert plan.pick([[9, 8, 7, 6, 5]], 1, 4) == [8, 7, 6]
    assert plan.pick([[9, 8, 7, 6, 5]], 1, 4, moving=True) == []


@pytest.mark.parametrize("seed", range(50))
def test_what_is_below_is_the_beginning_of_the_list(seed: int) -> None:
    rng = random.Random(seed)
    g = Groups(BLOCK, tuple(rng.choice([None, windowed(rng.randint(1, 40))]) for _ in range(rng.randint(2, 5))))
    plan = g.plan(rng.randint(1, 100))
    tables = [[1000 * (n + 1) + i for i in range(plan.blocks)] for n in range(len(g.skipped))]
    whole = plan.pick(tables, 0, plan.blocks)
    assert len(whole) == plan.count
    for i in range(plan.blocks + 1):
        assert whole[: plan.below(i)] == plan.pick(tables, 0, i)
    split = rng.randint(0, plan.blocks)
    assert plan.pick(tables, 0, split) + plan.pick(tables, split, plan.blocks) == whole


def groups_of(model: Sequence[Any], retention: int | None) -> Any:
    """The model's groups in vLLM's terms, one layer each. retention: how many tokens apart windows are cached; None: everywhere."""
    import torch  # noqa: PLC0415
    from vllm.v1 import kv_cache_interface as kv  # noqa: PLC0415

    common = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32, "dcp_sharded": False}
    made = []
    for i, kind in enumerate(model):
        spec: Any
        if kind is None:
            spec = kv.FullAttentionSpec(**common)
        elif kind[0] == "window":
            spec = kv.SlidingWindowSpec(**common, sliding_window=kind[1])
        else:
            spec = kv.ChunkedLocalAttentionSpec(**common, attention_chunk_size=kind[1])
        made.append(kv.KVCacheGroupSpec([f"layers.{i}"], spec))
    return kv.KVCacheConfig(num_blocks=TOTAL, kv_cache_tensors=[], kv_cache_groups=made, prefix_cache_retention_interval=retention)


class Side:
    """An engine: vLLM's cache manager, what every slot of its cache holds, and the connector's control."""

    def __init__(self, model: Sequence[Any], rng: random.Random, retention: int | None = None) -> None:
        from vllm.utils.hashing import sha256  # noqa: PLC0415
        from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: PLC0415
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: PLC0415

        from headrace.vllm import describe  # noqa: PLC0415
        from headrace.vllm.connector import _Pool  # noqa: PLC0415

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.model, self.rng = model, rng
        config = groups_of(model, retention)
        self.manager = KVCacheManager(
            config, max_model_len=CONTEXT, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=True, max_in_flight_tokens=64
        )
        self.slots: dict[tuple[int, int], object] = {}
        clock = Clock()
        self.daemon = Daemon(rng, clock)
        self.control = Control(self.daemon, block_tokens=BLOCK, block_bytes=1, log=lambda *_: None, clock=clock, wall_ms=clock.wall_ms)
        self.control.manage(describe.groups(config, self.manager), _Pool(self.manager.block_pool))
        self.deadline = clock.wall_ms() + 60_000
        self.free = self.manager.block_pool.get_num_free_blocks()

    def request(self, name: str, prompt: list[int]) -> Any:
        from vllm.sampling_params import SamplingParams  # noqa: PLC0415
        from vllm.v1.request import Request  # noqa: PLC0415

        return Request(name, prompt, SamplingParams(max_tokens=CONTEXT), None, block_hasher=self.hasher)

    def tables(self, req: Any) -> tuple[list[int], ...]:
        tables: tuple[list[int], ...] = self.manager.get_block_ids(req.request_id)
        return tables

    def compute(self, req: Any, tokens: int, **more: Any) -> None:
        """A step: allocates, looks at what attention looks at, and writes."""
        begin = req.num_computed_tokens + more.get("num_new_computed_tokens", 0)
        assert self.manager.allocate_slots(req, tokens, **more) is not None, "the pool is too small for this test"
        for group, table in enumerate(self.tables(req)):
            for at in range(self.looks_back(group, begin), begin):
                slot = (table[at // BLOCK], at % BLOCK)
                assert slot[0] != 0, f"token {begin} of {req.request_id} looks at {at}, whose block vLLM has dropped"
                assert self.slots.get(slot) == content(req, group, at), f"token {begin} of {req.request_id} reads another's KV at {at}"
            for at in range(begin, begin + tokens):
                self.slots[table[at // BLOCK], at % BLOCK] = content(req, group, at)
        req.num_computed_tokens = begin + tokens

    def looks_back(self, group: int, at: int) -> Any:
        """The first token that the one at this place attends to."""
        kind = self.model[group]
        if kind is None:
            return 0
        return max(0, at - kind[1] + 1) if kind[0] == "window" else at // kind[1] * kind[1]

    def generate(self, req: Any, tokens: int) -> None:
        for _ in range(tokens):
            req.append_output_token_ids(self.rng.randint(1, 9))
            self.compute(req, 1)

    def others(self, n: int) -> None:
        """Requests that come and go: what is free is written over."""
        for _ in range(n):
            req = self.request(f"other {self.rng.random()}", [self.rng.randint(100, 10**6) for _ in range(self.rng.randint(1, 150))])
            self.prefill(req, lambda _: None)
            self.manager.free(req)

    def flood(self) -> None:
        """Others take every block that is free, and write there."""
        taken = []
        while self.manager.block_pool.get_num_free_blocks():
            req = self.request(f"flood {self.rng.random()}", [self.rng.randint(100, 10**6) for _ in range(BLOCK)])
            if self.manager.allocate_slots(req, BLOCK) is None:
                break
            taken.append(req)
            for group, table in enumerate(self.tables(req)):
                self.slots.update({(table[0], i): content(req, group, i) for i in range(BLOCK)})
        for req in taken:
            self.manager.free(req)

    def prefill(self, req: Any, each: Any) -> None:
        blocks, local, _ = self.manager.get_computed_blocks(req)
        more: dict[str, Any] = {"num_new_computed_tokens": local, "new_computed_blocks": blocks}
        while req.num_computed_tokens < req.num_prompt_tokens:
            had = req.num_computed_tokens + more.get("num_new_computed_tokens", 0)
            chunk = min(self.rng.randint(1, 3 * BLOCK), req.num_prompt_tokens - had)
            self.compute(req, chunk, **more)
            more = {}
            each(req)


def content(req: Any, group: int, at: int) -> object:
    return group, tuple(req.all_token_ids[: at + 1])


def hand_over(model: Sequence[Any], rng: random.Random, tokens: int) -> None:
    p, d = Side(model, rng, rng.choice([None, 0])), Side(model, rng, rng.choice([None, 0]))
    prompt = [rng.randint(1, 50) for _ in range(tokens)]
    offer = Offer(tokens, digest(prompt, []))
    for side in (p, d):
        side.others(3)
        if rng.random() < 0.6:  # the beginning is known
            known = side.request("known", [*prompt[: rng.randint(1, tokens)], 99])
            side.prefill(known, lambda _: None)
            side.manager.free(known)
    source, lease = prefill(p, prompt, offer)
    target, bound, ext = decode(d, prompt, offer, lease)
    if bound is None:
        assert ext == 0
        d.prefill(target, lambda _: None)
    else:
        moved = bound.first_token // BLOCK
        for a, b in zip(lease.blocks[moved:], bound.blocks[moved:], strict=True):
            for i in range(BLOCK):
                d.slots[b, i] = p.slots.get((a, i))
        # As Scheduler._update_waiting_for_remote_kv does
        d.manager.cache_blocks(target, target.num_computed_tokens)
        if target.num_computed_tokens == target.num_tokens:
            target.num_computed_tokens -= 1
        d.others(2)
        d.compute(target, target.num_tokens - target.num_computed_tokens)
    d.generate(target, rng.randint(0, 4 * BLOCK))
    again = d.request("again", prompt + [77] * BLOCK)  # what came is found in the prefix cache, and is right
    d.prefill(again, lambda _: None)
    for req in (target, again):
        d.manager.free(req)
    p.control.sends._end(p.control.sends._sends["rp"], "")
    p.manager.free(source)
    for side in (p, d):
        assert side.manager.block_pool.get_num_free_blocks() == side.free, "blocks are missing"


def prefill(p: Side, prompt: list[int], offer: Offer) -> tuple[Any, Lease]:
    """P computes, others between its steps; it ends, and others write over whatever is free then."""
    req = p.request("rp", prompt)
    p.control.added("rp", params("prefill", 1, p.deadline) | {}, lambda: offer)

    def step(req: Any) -> None:
        if "rp" not in p.control.sends._sends:
            p.control.allocated("rp", 0, p.tables(req), len(prompt), lambda: offer)
        p.control.sends.advance("rp", req.num_computed_tokens, lambda: p.tables(req))
        send = p.control.sends._sends["rp"]
        for block in send.blocks[: send.complete]:
            assert (block, 0) in p.slots, "pushed before it was computed"
        p.others(p.rng.choice([0, 0, 1]))

    p.prefill(req, step)
    # As Scheduler._connector_finished does
    p.manager.remove_skipped_blocks("rp", req.num_computed_tokens, num_prompt_tokens=req.num_prompt_tokens)
    held, _ = p.control.finished("rp", False)
    assert held
    p.flood()
    (lease,) = p.daemon.living.values()
    assert lease.nonce in p.daemon.record
    assert lease.tokens >= len(lease.blocks) * BLOCK - BLOCK + 1
    return req, lease


def decode(d: Side, prompt: list[int], offer: Offer, lease: Lease) -> tuple[Any, Lease | None, int]:
    """D asks, and gives blocks, as Scheduler.schedule does."""
    req = d.request("rd", prompt)
    d.control.added("rd", params("decode", 1, d.deadline), lambda: offer)
    groups = d.control.loads.groups
    meta = offer.encode() if groups.plain else Offer(offer.prompt_tokens, offer.digest, groups.most(len(prompt), len(prompt))).encode()
    d.daemon.offer(1, lease.tokens, meta)
    blocks, local, _ = d.manager.get_computed_blocks(req)
    ext = d.control.matched("rd", local, False)
    assert ext is not None
    if ext == 0:
        return req, None, 0
    new = d.manager.allocate_slots(
        req, 0, num_new_computed_tokens=local, new_computed_blocks=blocks, num_external_computed_tokens=ext, delay_cache_blocks=True
    )
    assert new is not None
    d.control.allocated("rd", ext, d.tables(req), len(prompt), lambda: offer)
    req.num_computed_tokens = local + ext
    d.manager.remove_skipped_blocks("rd", req.num_computed_tokens)  # what an abort does meanwhile takes nothing that the daemon writes
    bound = d.daemon.living[ticket(1)[8:24]]
    assert 0 not in bound.blocks
    assert len(bound.blocks) == len(lease.blocks)
    for b in bound.blocks[bound.first_token // BLOCK :]:
        assert d.manager.block_pool.blocks[b].ref_cnt == 1, "it is another request's too"
    return req, bound, ext


@pytest.mark.parametrize("name", MODELS)
def test_every_token_reads_its_own_prompt(name: str) -> None:
    pytest.importorskip("vllm")
    for seed in range(12):
        rng = random.Random(f"{name} {seed}")
        hand_over(MODELS[name], rng, rng.choice([rng.randint(2, 3 * BLOCK), rng.randint(2, 150)]))


@pytest.mark.parametrize("tokens", range(2, 45))
def test_every_place_of_a_window_in_a_block(tokens: int) -> None:
    pytest.importorskip("vllm")
    hand_over(MODELS["window of whole blocks"], random.Random(tokens), tokens)


def test_a_whole_prompt_would_lack_the_block_of_its_last_tokens_window() -> None:
    """Why the last token is left to the decode."""
    pytest.importorskip("vllm")
    d = Side([None, ("window", 2 * BLOCK)], random.Random(1))
    req = d.request("r", list(range(1, 5 * BLOCK)))
    tokens = req.num_tokens
    d.manager.allocate_slots(req, 0, num_external_computed_tokens=tokens, delay_cache_blocks=True)
    needed = d.looks_back(1, tokens - 1) // BLOCK
    assert d.tables(req)[1][needed] == 0


@pytest.mark.parametrize("tokens", range(5 * BLOCK, 6 * BLOCK + 1))
def test_what_was_sent_is_found_again_but_for_prompts_of_whole_blocks(tokens: int) -> None:
    """With what vLLM keeps of windows where nothing else is asked of it. The document says so."""
    pytest.importorskip("vllm")
    d = Side([None, ("window", 3 * BLOCK)], random.Random(1), retention=0)
    req = d.request("r", list(range(1, tokens + 1)))
    d.manager.allocate_slots(req, 0, num_external_computed_tokens=tokens - 1, delay_cache_blocks=True)
    d.manager.cache_blocks(req, tokens - 1)
    for group, table in enumerate(d.tables(req)):
        d.slots.update({(table[at // BLOCK], at % BLOCK): content(req, group, at) for at in range(tokens - 1)})
    req.num_computed_tokens = tokens - 1
    d.compute(req, 1)
    d.generate(req, 12)
    d.manager.free(req)
    _, found, _ = d.manager.get_computed_blocks(d.request("longer", [*range(1, tokens + 1), 77, 77]))
    assert found == (0 if tokens % BLOCK == 0 else tokens // BLOCK * BLOCK)


def test_kinds_that_cannot_be_handed_over_are_named() -> None:
    pytest.importorskip("vllm")
    import torch  # noqa: PLC0415
    from vllm.v1 import kv_cache_interface as kv  # noqa: PLC0415

    from headrace.vllm import describe  # noqa: PLC0415

    common = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    full = kv.FullAttentionSpec(**common)
    mamba = kv.MambaSpec(block_size=16, shapes=((8,),), dtypes=(torch.float32,))
    larger = kv.SlidingWindowSpec(**{**common, "head_size": 16}, sliding_window=32)
    longer = kv.SlidingWindowSpec(**{**common, "block_size": 32, "head_size": 4}, sliding_window=32)
    padded = kv.SlidingWindowSpec(**{**common, "head_size": 7}, sliding_window=32, page_size_padded=full.page_size_bytes)
    latent = kv.SlidingWindowMLASpec(**common, sliding_window=32)
    for spec, text in (
        (mamba, "b is of kind MambaSpec"),
        (latent, "b is of kind SlidingWindowMLASpec"),
        (larger, r"2 groups with blocks of unequal size: 16 tokens in \d+ bytes in a, 16 tokens in \d+ bytes in b"),
        (longer, "32 tokens in"),
        (padded, "bytes, padded in b"),
    ):
        config = kv.KVCacheConfig(8, [], [kv.KVCacheGroupSpec(["a"], full), kv.KVCacheGroupSpec(["b"], spec)])
        with pytest.raises(describe.Unfit, match=text):
            describe._check_groups(config)
    window = kv.SlidingWindowSpec(**common, sliding_window=32)
    config = kv.KVCacheConfig(8, [], [kv.KVCacheGroupSpec(["a"], full), kv.KVCacheGroupSpec(["b", "c"], window)])
    describe._check_groups(config)
    assert describe.group_words(config) == "2 groups: all tokens, window of 32 tokens"
    assert describe.group_words(kv.KVCacheConfig(8, [], [kv.KVCacheGroupSpec(["a"], full)])) == ""
