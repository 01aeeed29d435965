"""Which blocks a prompt's KV consists of where a model's layers are of several kinds, and in which order a lease lists them.

vLLM puts layers that keep the same tokens into a group, and gives every group a table of blocks of its own, whose ids are unique
over all groups: a block's bytes are one block of each tensor, and in each tensor lies one layer of each group. To a daemon that
is one list of blocks over as many layers as there are tensors. The list's order is by place in the prompt: the first block of every
group, then the second of every group. So it grows at its end while the prompt is computed chunk by chunk, and what a decode
has in its prefix cache is its beginning.

A group with a sliding window keeps only the blocks that the next token's window reaches into; vLLM puts its null block in the place
of the others, whose memory is somebody else's by then. Those are listed by neither side: where a window begins is computed from
the number of tokens, by vLLM's own cache manager at both ends.

With a window the prompt's last token is left to the decode, which computes it in any case: that token's window reaches one
token further back than that of the token behind the prompt, for which vLLM would have dropped a block too many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Table = Sequence[int]  # a group's blocks of a request, in the prompt's order
Skipped = Callable[[int], int]  # of so many computed tokens, how many the next one does not look at


class Dropped(ValueError):
    """vLLM's tables do not hold a block that the lease lists."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of an engine's cache. skipped: of each group, None where it keeps all tokens."""

    block_tokens: int
    skipped: tuple[Skipped | None, ...] = (None,)
    null: int = 0  # the id of vLLM's null block

    @property
    def plain(self) -> bool:
        """One group that keeps everything: its table is the lease's list."""
        return self.skipped == (None,)

    def plan(self, tokens: int) -> Plan:
        """For a hand-over of the prompt's first tokens."""
        blocks = -(-tokens // self.block_tokens)
        firsts = tuple(min(blocks, s(tokens) // self.block_tokens) if s is not None else 0 for s in self.skipped)
        return Plan(self, tokens, blocks, firsts)

    def most(self, tokens: int, prompt: int) -> int:
        """Of a prompt of so many tokens, the first of which could be handed over, how many are."""
        return tokens if self.plain else min(tokens, prompt - 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """One prompt's list of blocks."""

    groups: Groups
    tokens: int
    blocks: int  # of a table
    firsts: tuple[int, ...]  # of each group's table, the first block that is listed

    @property
    def count(self) -> int:
        """Blocks that are listed."""
        return self.below(self.blocks)

    @property
    def lease_tokens(self) -> int:
        """The list's tokens, as a daemon counts them. Of several groups' blocks all go as whole ones: each table's last may not be full."""
        return self.tokens if self.groups.plain else self.count * self.groups.block_tokens

    def below(self, block: int) -> int:
        """How many are listed of the tables' blocks before this one."""
        block = min(block, self.blocks)
        return sum(max(0, block - first) for first in self.firsts)

    def pick(self, tables: Sequence[Table], begin: int, end: int, *, moving: bool = False) -> list[int]:
        """What is listed of the tables' blocks from begin to before end; moving: only of groups with a window.

        Dropped when a table does not have them.
        """
        if len(tables) != len(self.firsts):
            raise Dropped(f"vLLM gave blocks of {len(tables)} groups, the cache has {len(self.firsts)}")
        if self.groups.plain and end <= len(tables[0]):
            return [] if moving else list(tables[0][begin:end])
        out = []
        for i in range(begin, end):
            for group, (table, first) in enumerate(zip(tables, self.firsts, strict=True)):
                if i < first or (moving and self.groups.skipped[group] is None):
                    continue
                if i >= len(table) or (table[i] == self.groups.null and not self.groups.plain):
                    raise Dropped(f"vLLM has no block {i} of group {group}, which the decode of {self.tokens} tokens needs")
                out.append(table[i])
        return out
