"""What control tells the workers with each step, and what they answer. Plain values: vLLM pickles them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.events import LeaseRef


class Keeper(Protocol):
    """Keeps blocks from being used again although vLLM has done with them."""

    def keep(self, blocks: Sequence[int]) -> None: ...
    def release(self, blocks: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Push:
    """These blocks of a request are complete when this step's forward pass is."""

    ref: LeaseRef
    first: int  # block of the lease's list
    count: int


@dataclass(slots=True)
class Step:
    """One step's work for every worker."""

    pushes: list[Push] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # requests whose load failed and whose blocks are fenced: report them once
    arrived: bool = False  # this step is the first that may read KV which came meanwhile
    beat: bool = False  # answer in any case, so that the scheduler's half is called after the step


@dataclass(slots=True)
class Answer:
    """A worker's answer, or several ones' together."""

    refused: list[tuple[LeaseRef, str]] = field(default_factory=list)  # leases of which something could not be pushed, and why
    absent: dict[int, str] = field(default_factory=dict)  # ranks that lend no memory at present, and why

    def join(self, other: Answer) -> Answer:
        return Answer(self.refused + other.refused, self.absent | other.absent)
