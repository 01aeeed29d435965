"""Runs `headrace bench engine` and llama.py by turns and prints medians and ratios; see scripts/bench-engine.sh."""

import argparse
import json
import os
import statistics
import subprocess
import sys

a = argparse.ArgumentParser(prog="bench-engine.sh", description="Measure our engine beside llama.cpp on the same file with the same threads.")
a.add_argument("--headrace", required=True, help=argparse.SUPPRESS)
a.add_argument("--model", required=True, help="GGUF file")
a.add_argument("--threads", type=int, default=os.cpu_count())
a.add_argument("--prompt", type=int, default=512, help="tokens of the prompt that is read")
a.add_argument("--generate", type=int, default=64, help="tokens generated")
a.add_argument("--context", default="16,1000", help="tokens before the generated ones")
a.add_argument("--rounds", type=int, default=3)
a.add_argument("--json", action="store_true")
o = a.parse_args()


def run(*cmd):
    out = subprocess.run([str(c) for c in cmd], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if out.returncode != 0:
        sys.exit(f"{cmd[0]} ended with {out.returncode}:\n{out.stderr[-2000:]}")
    return json.loads(out.stdout.strip().splitlines()[-1] if "llama.py" in str(cmd[1]) else out.stdout)


def ours():
    return run(o.headrace, "bench", "engine", "--json", "--model", o.model, "--threads", o.threads, "--prompt", o.prompt, "--generate", o.generate,
               "--context", o.context, "--batch", 1, "--rounds", 1, "--startup=false")


def llama(flash):
    script = os.path.join(os.path.dirname(__file__), "llama.py")
    return run(sys.executable, script, o.model, o.threads, o.prompt, o.generate, o.context, flash)


rows, info, flashes = {}, {}, ("on", "off")
for n in range(o.rounds):
    print(f"round {n + 1} of {o.rounds}", file=sys.stderr)
    mine = ours()
    theirs = {f: llama(f) for f in flashes}
    info = {"model": os.path.basename(o.model), "type": mine["type"], "threads": o.threads, "kernel": mine["kernel"], "load_ms": mine["load_ms"],
            "llama_load_ms": theirs["on"]["load_ms"], "llama_system": theirs["on"]["system"]}
    for i, r in enumerate(mine["rows"]):
        row = rows.setdefault((r["what"], r["context"]), {"ours": [], "on": [], "off": [], "ratio": []})
        row["ours"].append(r["tokens_per_s"])
        for f in flashes:
            row[f].append(theirs[f]["rows"][i]["tokens_per_s"])
        # Against the setting that is better for llama.cpp in this very round.
        row["ratio"].append(row["ours"][-1] / max(row[f][-1] for f in flashes))

report = [{"what": w, "context": c, "tokens_per_s": statistics.median(r["ours"]), "llama_flash_tokens_per_s": statistics.median(r["on"]),
           "llama_plain_tokens_per_s": statistics.median(r["off"]), "ratio": statistics.median(r["ratio"]), "ratio_min": min(r["ratio"]),
           "ratio_max": max(r["ratio"])} for (w, c), r in rows.items()]
if o.json:
    print(json.dumps({**info, "rows": report}, indent=2))
else:
    print(f"{'what':>8} {'context':>8} {'ours tok/s':>11} {'llama.cpp, flash':>17} {'llama.cpp, plain':>17} {'ratio':>6} {'lowest':>7} {'highest':>8}")
    for r in report:
        print(f"{r['what']:>8} {r['context']:>8} {r['tokens_per_s']:>11.1f} {r['llama_flash_tokens_per_s']:>17.1f} {r['llama_plain_tokens_per_s']:>17.1f} "
              f"{r['ratio']:>6.2f} {r['ratio_min']:>7.2f} {r['ratio_max']:>8.2f}")
    print(f"{info['model']} ({info['type']}), {o.threads} threads, {info['kernel']} kernels; medians of {o.rounds} alternating rounds; ratio to llama.cpp's better setting of each round")
    print(f"llama.cpp: {info['llama_system']}")
