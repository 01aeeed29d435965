#!/usr/bin/env python3
"""Encodes the texts of standard input, one JSON string a line, with Hugging Face `tokenizers`: a line of ids for each.

    venv/bin/python encode.py tokenizer.json < texts
"""
import json
import sys

from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file(sys.argv[1])
for line in sys.stdin:
    print(*tokenizer.encode(json.loads(line)).ids)
