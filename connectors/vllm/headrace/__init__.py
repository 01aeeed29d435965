"""Headrace's Python side: a client of the node daemon, and what vLLM needs to lend its KV cache to one.

protocol   bytes of docs/protocol.md
client     an engine's connection, without threads and without waiting
ring       pushes and completions in shared memory
memory     KV cache in memfds, which a daemon can map
cuda       a GPU's memory as dma-bufs, or staged over pinned memory
layout     what lies where in the caches that vLLM registers
vllm       the connector itself (kv_connector_module_path)
"""

__version__ = "0.1.0"
