"""Measures llama.cpp (PyPI wheel xllamacpp) as `headrace bench engine` measures our engine; prints one JSON document.

    python llama.py MODEL.gguf THREADS PROMPT GENERATE CONTEXT[,CONTEXT...] on|off

The rates are llama.cpp's own timings of single requests with an empty cache: F16 KV, batches of 512 tokens, flash
attention on or off as told.
"""

import json
import sys
import time

import xllamacpp as x

model, threads, prompt, generate, contexts, flash = sys.argv[1:]
contexts = [int(c) for c in contexts.split(",")]
generate = int(generate)

started = time.monotonic()
p = x.CommonParams()
p.model.path = model
p.n_ctx = max(contexts + [int(prompt)]) + generate + 64
p.n_parallel, p.n_batch, p.n_ubatch = 1, 512, 512
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = int(threads)
kind = x.llama_flash_attn_type
p.flash_attn_type = kind.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash == "on" else kind.LLAMA_FLASH_ATTN_TYPE_DISABLED
p.verbosity = 0
server = x.Server(p)
load_ms = (time.monotonic() - started) * 1000


def request(tokens, n):
    ids = [(i * 7919 + 13) % 40000 + 100 for i in range(tokens)]
    body = {"prompt": ids, "n_predict": n, "temperature": 0, "top_k": 1, "cache_prompt": False, "ignore_eos": True}
    return server.handle_completions(body)["timings"]


rows = [{"what": "prefill", "context": int(prompt), "tokens_per_s": request(int(prompt), 1)["prompt_per_second"]}]
for c in contexts:
    rows.append({"what": "decode", "context": c, "tokens_per_s": request(c, generate)["predicted_per_second"]})
with open("/proc/self/status") as f:
    resident = next(int(line.split()[1]) for line in f if line.startswith("VmRSS:")) * 1024 / 1e6
print(json.dumps({"rows": rows, "load_ms": load_ms, "resident_mb": resident, "system": x.get_system_info().strip(" |")}))
