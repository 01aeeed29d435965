"""Writes the golden values that worker/model is tested against, computed by llama.cpp (PyPI wheel xllamacpp).

    python -m venv v && v/bin/pip install xllamacpp==2026.10.11549 gguf tokenizers
    for t in F32 F16 Q4_0; do go run ./test/golden/mkmodel $t MODEL.gguf $t.gguf; done
    go run ./test/golden/mkmodel tiny 1 tiny.gguf
    v/bin/python test/golden/golden.py MODEL.gguf F32.gguf F16.gguf Q4_0.gguf tiny.gguf test/golden

Every run is greedy; a step holds the token taken and the most likely tokens with their log probabilities. llama.cpp
keeps its KV cache in F32 and uses one thread and no flash attention.
"""

import hashlib
import json
import sys

import xllamacpp as x
from gguf import GGUFReader
from prompts import PROMPTS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

STEPS, TOP = 24, 8


def tokenizer(path):
    """A byte-level BPE of the file's vocabulary: good enough to get plausible ids out of text."""
    r = GGUFReader(path)
    strings = lambda key: [bytes(r.fields[key].parts[i]).decode() for i in r.fields[key].data]
    tokens = strings("tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ")) for m in strings("tokenizer.ggml.merges")]
    t = Tokenizer(models.BPE({s: i for i, s in enumerate(tokens)}, merges))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in ("<|im_start|>", "<|im_end|>")])
    return t


def server(path):
    p = x.CommonParams()
    p.model.path = path
    p.n_ctx, p.n_parallel = 2048, 1
    p.cache_type_k = p.cache_type_v = x.ggml_type.GGML_TYPE_F32
    p.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
    p.warmup, p.verbosity = False, 0
    return x.Server(p)


def run(s, prompt):
    r = s.handle_completions(
        {"prompt": prompt, "n_predict": STEPS, "temperature": 0, "n_probs": TOP, "cache_prompt": False}
    )
    steps = r["choices"][0]["logprobs"]["content"]
    return {
        "prompt": prompt,
        "tokens": [c["id"] for c in steps],
        "top": [[[t["id"], round(t["logprob"], 5)] for t in c["top_logprobs"]] for c in steps],
    }


def stepwise(s, prompt):
    """run, a request a token: llama.cpp leaves tokens that are no whole UTF-8 out of its report of a longer answer.
    A token that is not even reported alone is replaced, so that all tokens of the context are known."""
    out = {"prompt": prompt, "tokens": [], "top": []}
    for _ in range(STEPS):
        r = s.handle_completions(
            {"prompt": prompt + out["tokens"], "n_predict": 1, "temperature": 0, "n_probs": TOP, "cache_prompt": False}
        )
        steps = (r["choices"][0]["logprobs"] or {"content": []})["content"]
        out["tokens"].append(steps[0]["id"] if steps else 3 + len(out["tokens"]))
        out["top"].append([[t["id"], round(t["logprob"], 5)] for c in steps for t in c["top_logprobs"]])
    return out


def write(path, model, weights, prompts, run=run):
    s = server(model)
    runs = [run(s, p) for p in prompts]
    with open(model, "rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    head = {"engine": "llama.cpp, xllamacpp 2026.10.11549", "weights": weights, "sha256": digest}
    with open(path, "w") as f:
        f.write(json.dumps(head)[:-1] + ', "runs": [\n')
        f.write(",\n".join(json.dumps(r, separators=(",", ":")) for r in runs) + "\n]}\n")
    print(path, [len(r["prompt"]) for r in runs], [len(r["tokens"]) for r in runs])


def main():
    quantized, dequantized, half, q40, tiny, out = sys.argv[1:]
    t = tokenizer(quantized)
    prompts = [t.encode(p).ids for p in PROMPTS]
    write(f"{out}/smollm2_f32.json", dequantized, "SmolLM2-135M-Instruct.Q4_1.gguf, every tensor dequantized to F32", prompts)
    write(f"{out}/smollm2_q4_1.json", quantized, "SmolLM2-135M-Instruct.Q4_1.gguf", prompts)
    some = [prompts[i] for i in (1, 2, 4, 6)]
    write(f"{out}/smollm2_f16.json", half, "SmolLM2-135M-Instruct.Q4_1.gguf, every matrix converted to F16", some)
    write(f"{out}/smollm2_q4_0.json", q40, "SmolLM2-135M-Instruct.Q4_1.gguf, every matrix converted to Q4_0", some)
    state, random = 1, []
    for _ in range(1500):
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        random.append(3 + (state >> 8) % 300)
    write(f"{out}/tiny_f32.json", tiny, "tinymodel of seed 1", [random[:1], random[:17], random[:300], random[:1500]], stepwise)


main()
