#!/usr/bin/env python3
"""Writes golden.json: what Hugging Face `tokenizers` makes of texts, for ../tokenizer_test.go.

    python3 -m venv venv && venv/bin/pip install tokenizers gguf
    venv/bin/python golden.py ~/.cache/headrace/models/SmolLM2-135M-Instruct.Q4_1.gguf > golden.json

"smollm" is the whole tokenizer of SmolLM2: vocabulary, merges and special tokens out of the GGUF file, and the
pre-tokenizer of its tokenizer.json (digits alone, then ByteLevel). "splits" are the pieces that the pre-tokenizers of
GPT-2, Llama 3 and Qwen 2 cut, which need no vocabulary.
"""
import json
import random
import sys

from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, decoders

LLAMA = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")

TEXTS = [
    "", " ", "  ", "   a", "a   ", "\n", "\r\n", "\r\n\r\n", " \n \n ", "\t\tx\ty", "a\u00a0b", "a\u2028b\u3000c\u0085d",
    "Hello, world!", " Hello", "hello  world   again    and     so on", "The capital of France is",
    "I'm you're he's we'll they'd don't I've 'sup 'S 'RE 'lL Don'T I'M '\u017f x'\u017fa",
    "0", "12", "123", "1234567890", "3.14159", "a1b22c333d4444", " 12 34  56   78", "\u0661\u0662\u0663 \u00bd \u2167 \u00b2",
    "x = y ** 2 + 17 // 3; // comment --> <!-- html -->", "!!!???...---", "   !!!\n\n...", "...\r\n...\n\n\nabc",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tdef g(self):\n\t\tpass\n",
    "#include <stdio.h>\nint main(void) {\n    printf(\"%d\\n\", 42);\n    return 0;\n}\n",
    "{\"a\": [1, 2, {\"b\": null}], \"c\": \"d\\u00e9\"}", "https://example.com/path?q=1&r=a%20b#frag",
    "\u00dcber stra\u00dfe na\u00efve caf\u00e9 e\u0301 \u00c5ngstr\u00f6m", "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! 2024",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f", "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645", "\u0928\u092e\u0938\u094d\u0924\u0947",
    "\ud55c\uad6d\uc5b4 \ud14d\uc2a4\ud2b8", "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f \U0001f9d1\U0001f3fd\u200d\U0001f4bb", "\U00010348\U0002a6d6\U000e0001",
    "a\u0000b\u0001\u007f", "\ufeffBOM", "\ufffd\ufffd", "\u200b\u200c\u200d", "a" * 200, "ab" * 150, " " * 100, "\n" * 50, " \t" * 40,
    "1" * 60, "=" * 80, "\u00e9" * 70, "Antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>", "<|im_start", "<<|im_end|>>", "<|im_end|><|im_end|>", "a<|endoftext|>b  <repo_name> <file_sep>c",
    "\u0130stanbul \u01c5 \u1e9e \ufb01", "tab\tnbsp\u00a0em\u2003zero\u200bword\u2060joiner", "a\x0bb\x0cc\x1cd\x1de",
]


def more(n):
    """Random texts from classes of characters that the pre-tokenizers tell apart."""
    rng = random.Random(20261121)
    pools = [list("abcdefgXYZ"), list("0123456789"), list("    \t\n\r\n"), list(".,;:!?'\"()-_/<>|"),
             ["'s", "'T", "'re", "'ll"], list("\u00e9\u00df\u4f60\u597d\u0416\u0661\u00bd\u2167"), list("\u00a0\u3000\u2028\u0085"), list("\U0001f600\U0001f44d\u200d\ufe0f\u0301")]
    weights = [30, 8, 20, 12, 4, 6, 3, 3]
    for _ in range(n):
        text = ""
        for _ in range(rng.randint(1, 25)):
            pool = rng.choices(pools, weights)[0]
            text += "".join(rng.choice(pool) for _ in range(rng.randint(1, 5)))
        yield text


def smollm(path):
    fields = GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types) if k == 3])
    return tok


def pieces(pre, text):
    """The pieces as offsets in bytes of UTF-8."""
    ends = []
    for _, (_, end) in pre.pre_tokenize_str(text):
        ends.append(len(text[:end].encode()))
    return ends


def main():
    tok = smollm(sys.argv[1])
    split = {
        "gpt-2": pre_tokenizers.Split(Regex(
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated"),
        "llama-bpe": pre_tokenizers.Split(Regex(LLAMA), "isolated"),
        "qwen2": pre_tokenizers.Split(Regex(LLAMA.replace("{1,3}", "")), "isolated"),
        "smollm": pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(
                r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated")]),
    }
    rows = []
    for text in TEXTS + list(more(150)):
        ids = tok.encode(text, add_special_tokens=False).ids
        rows.append({
            "text": text, "ids": ids,
            "decoded": tok.decode(ids, skip_special_tokens=True),
            "splits": {name: pieces(pre, text) for name, pre in split.items()},
        })
    # Any tokens in any order: the text is not UTF-8 then, and each maximal invalid part decodes to U+FFFD.
    rng = random.Random(7)
    loose = []
    for _ in range(60):
        ids = [rng.choice((rng.randrange(tok.get_vocab_size()), rng.randrange(17, 280))) for _ in range(rng.randint(1, 12))]
        loose.append({"ids": ids, "decoded": tok.decode(ids, skip_special_tokens=True)})
    json.dump({"rows": rows, "loose": loose}, sys.stdout, separators=(",", ":"))
    print()


main()
