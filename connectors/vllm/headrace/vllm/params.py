"""What the router says of a request in kv_transfer_params, and what P and D must agree on of its prompt."""

from __future__ import annotations

import array
import base64
import binascii
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

VERSION = 1
TICKET_BYTES_MAX = 512
NONCE = slice(8, 24)  # of a ticket


class BadParams(ValueError):
    """kv_transfer_params that are not what this connector understands. The request goes on without them."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What the router asks of this engine for one request."""

    role: Literal["prefill", "decode"]
    ticket: bytes
    nonce: bytes
    peer: str  # of D's daemon, "host:port"; prefill only
    deadline_ms: int  # Unix; the ticket's own, past which no daemon takes it


def parse(params: Mapping[str, Any] | None) -> Ask | None:
    """The headrace part of kv_transfer_params, None where there is none."""
    part = (params or {}).get("headrace")
    if part is None:
        return None
    if not isinstance(part, Mapping):
        raise BadParams("kv_transfer_params.headrace is not an object")
    if part.get("v") != VERSION:
        raise BadParams(
            f"kv_transfer_params.headrace has v {part.get('v')!r}; this connector speaks {VERSION}: "
            "router and connector are of different releases"
        )
    role = part.get("role")
    if role not in ("prefill", "decode"):
        raise BadParams(f"kv_transfer_params.headrace has role {role!r}, which is neither prefill nor decode")
    try:
        ticket = base64.b64decode(part.get("ticket") or "", validate=True)
    except (binascii.Error, TypeError, ValueError) as err:
        raise BadParams(f"kv_transfer_params.headrace.ticket is not base64: {err}") from None
    if not NONCE.stop <= len(ticket) <= TICKET_BYTES_MAX or ticket[:4] != b"HRTK":
        raise BadParams(f"kv_transfer_params.headrace.ticket is no ticket ({len(ticket)} bytes)")
    peer = part.get("peer") or ""
    deadline = part.get("deadline_ms")
    if not isinstance(peer, str) or not isinstance(deadline, int) or isinstance(deadline, bool) or deadline <= 0:
        raise BadParams("kv_transfer_params.headrace lacks deadline_ms, or peer is not text")
    return Ask(role, ticket, ticket[NONCE], peer, deadline)


def digest(tokens: Sequence[int], extra: Iterable[object]) -> bytes:
    """A hash over everything that a prompt's KV depends on: its tokens, and extra, which vLLM's own block hash takes in as well."""
    ids = array.array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    h = hashlib.sha256(b"headrace prompt 1\0")
    h.update(len(ids).to_bytes(8, "little"))
    h.update(ids.tobytes())
    h.update(json.dumps(list(extra), separators=(",", ":"), sort_keys=True).encode())
    return h.digest()


@dataclass(frozen=True, slots=True)
class Offer:
    """The meta of PRESENT: what D must find in its own request before it takes P's KV for it."""

    prompt_tokens: int
    digest: bytes
    tokens: int | None = None  # that are handed over, where the lease's number of tokens does not say it: several groups of layers

    def encode(self) -> bytes:
        doc: dict[str, object] = {"v": VERSION, "prompt_tokens": self.prompt_tokens, "prompt": self.digest.hex()}
        if self.tokens is not None:
            doc["tokens"] = self.tokens
        return json.dumps(doc, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, meta: bytes) -> Offer:
        try:
            doc = json.loads(meta)
            if doc["v"] != VERSION:
                raise BadParams(f"the prefill's meta has version {doc['v']!r}, this connector speaks {VERSION}")
            tokens = doc.get("tokens")
            return cls(int(doc["prompt_tokens"]), bytes.fromhex(doc["prompt"]), None if tokens is None else int(tokens))
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise BadParams(f"the prefill's meta is not understood: {err}") from None
