#!/usr/bin/env python3
"""Prints the MB/s at which Hugging Face `tokenizers` encodes a text on one core: speed.py tokenizer.json TEXT"""
import os
import pathlib
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import Tokenizer  # noqa: E402: the variable is read when it is imported

tokenizer = Tokenizer.from_file(sys.argv[1])
text = pathlib.Path(sys.argv[2]).read_text()
tokenizer.encode(text[: len(text) // 4])
best, until = 0.0, time.monotonic() + 1
while time.monotonic() < until or not best:
    start = time.perf_counter()
    tokenizer.encode(text)
    best = max(best, len(text.encode()) / (time.perf_counter() - start) / 1e6)
print(best)
