#!/usr/bin/env python3
"""Writes golden.json.gz: what Hugging Face `tokenizers` makes of texts, for ../golden_test.go.

    python3 -m venv venv && venv/bin/pip install --require-hashes -r requirements.txt
    venv/bin/python golden.py ../../.. golden.json.gz

Each row of "families" is a whole tokenizer.json with a small vocabulary, trained here on the repository's own pages and
source, and the normalizer, pre-tokenizer, post-processor and model options that the family's published files have.
"""
import gzip
import json
import pathlib
import random
import sys

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEGIN = r"[^\r\n\p{L}\p{N}]?"
CASED = "{b}{u}*{l}+{c}|{b}{u}+{l}*{c}"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
DEEPSEEK = ("[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
            "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+")


def byte_level(regex=False, prefix=False):
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}


def split(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def sequence(*parts):
    return {"type": "Sequence", "pretokenizers": list(parts)}


def template(bos, index):
    return {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [index], "tokens": [bos]}}}


def cased(contraction):
    return CASED.format(b=BEGIN, u=UPPER, l=LOWER, c=contraction)


SPACE_TO_MARK = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
# name: (normalizer, pre-tokenizer, post-processor, model options)
BYTES = {
    "gpt2": (None, byte_level(regex=True), byte_level(), {}),
    "prefix": (None, byte_level(regex=True, prefix=True), byte_level(), {}),
    "smollm": (None, sequence({"type": "Digits", "individual_digits": True}, byte_level(regex=True)), None, {}),
    "numbers": (None, sequence({"type": "Digits", "individual_digits": False}, byte_level(regex=True)), None, {}),
    "llama3": (None, sequence(split(LETTERS + r"|\p{N}{1,3}" + SYMBOLS + TAIL), byte_level()),
               {"type": "Sequence", "processors": [byte_level(), template("<|bos|>", 0)]}, {"ignore_merges": True}),
    "qwen2": ({"type": "NFC"}, sequence(split(LETTERS + r"|\p{N}" + SYMBOLS + TAIL), byte_level()), byte_level(), {}),
    "qwen35": ({"type": "NFC"}, sequence(split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + TAIL),
        byte_level()), byte_level(), {}),
    "o200k": (None, sequence(split(cased(CONTRACTION) + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + TAIL), byte_level()),
              byte_level(), {"ignore_merges": True}),
    "tekken": (None, sequence(split(cased("") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + TAIL), byte_level()),
               template("<|bos|>", 0), {"ignore_merges": True}),
    "deepseek": ({"type": "Sequence", "normalizers": []},
                 sequence(split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK), byte_level()), byte_level(), {}),
}
PIECES = {
    "llama2": ({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, SPACE_TO_MARK]}, None,
               template("<|bos|>", 0), {"fuse_unk": True, "byte_fallback": True, "unk_token": "<unk>"}),
    "mistral": (None, {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False},
                template("<|bos|>", 0), {"fuse_unk": True, "byte_fallback": True, "unk_token": "<unk>"}),
    "always": (None, {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
               template("<|bos|>", 0), {"fuse_unk": True, "byte_fallback": True, "unk_token": "<unk>"}),
    "unknown": ({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, SPACE_TO_MARK]}, None,
                None, {"fuse_unk": True, "byte_fallback": False, "unk_token": "<unk>"}),
    "gemma": (SPACE_TO_MARK, {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
              template("<|bos|>", 0), {"fuse_unk": True, "byte_fallback": True, "unk_token": "<unk>"}),
}
ADDED = [AddedToken("<|bos|>", special=True, normalized=False), AddedToken("<|im_start|>", special=True, normalized=False),
         AddedToken("<|im_end|>", special=True, normalized=False), AddedToken("<left>", lstrip=True, normalized=False),
         AddedToken("<right>", rstrip=True, normalized=False), AddedToken("<|im_", normalized=False),
         AddedToken("nor mal", normalized=True), AddedToken("word", single_word=True, normalized=True), AddedToken("\n\n\n", normalized=False)]
OTHER = """Привет, мир! Быстрая коричневая лиса прыгает через ленивую собаку. 你好，世界。今天天气很好，我们去公园散步吧。こんにちは世界。
東京は日本の首都です。안녕하세요 세계. مرحبا بالعالم नमस्ते दुनिया Grüße aus München, où est la bibliothèque? ¿Dónde está el niño?"""
FIXED = [
    "", " ", "  ", "   a", "a   ", "\n", "\r\n\r\n", " \n \n ", "\t\tx\ty", "a\u00a0b", "a\u2028b\u3000c\u0085d", "Hello, world!", " Hello",
    "hello  world   again    and", "I'm you're he's we'll they'd don't I've 'sup 'S 'RE 'lL Don'T I'M '\u017f x'\u017fa", "0", "12", "1234567890",
    "3.14159", "a1b22c333d4444", "\u0661\u0662\u0663 \u00bd \u2167 \u00b2", "x = y ** 2 + 17 // 3; // comment --> <!-- html -->", "!!!\n\n...",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tdef g(self):\n\t\tpass\n", "HTTPServer camelCase XMLHttpRequest iPhone ALLCAPS McDonald's",
    "\u01c5\u01c5a \u02b0\u02b0A a\u0301B\u0301c \u0301\u0301A \u1f88x", "path/to/file.go:12/\r\n//", "$foo _bar'baz \u00e9_x #caf\u00e9", "a\u0000b\u0001\u007f \u0001\u0002abc",
    "\ufeffBOM \ufffd\ufffd", "a" * 100, "ab" * 80, " " * 60, "\n" * 30, "1" * 40, "你好" * 30, "\u00e9" * 70, "e\u0301 n\u0303 \u1100\u1161\u11a8 \u212b",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>", "<|im_start", "a <left> b <right> c  <left><right>  <left>", "<right>  <right> ", "nor mal  nor mal",
    "word words word. sword word", "\n\n\n\n\n\n", "<unk> <0x41> \u2581a\u2581\u2581b \u2581", "\U00010348\U0002a6d6\U000e0001", OTHER,
]


def rows(rng, count):
    pools = [list("abcdefgxyzXYZ"), list("etaoin"), list("0123456789"), list("    \t\n\r\n"), list(".,;:!?'\"()-_/<>|$#"), ["'s", "'T", "'re", "'ll"],
             list("éß你好世Жщ١½Ⅷ漢ぁァ"), list("\u00a0\u3000\u2028\u0085"), list("😀👍\u200d\ufe0f\u0301\u093fǅʰ\u0001"), [" the", "ing", " word ", "<left>", "<right>", "nor mal", "<|im_end|>"]]
    weights = [30, 20, 8, 20, 12, 4, 8, 3, 4, 4]
    for _ in range(count):
        text = ""
        for _ in range(rng.randint(1, 15)):
            pool = rng.choices(pools, weights)[0]
            text += "".join(rng.choice(pool) for _ in range(rng.randint(1, 4)))
        yield text


def train(name, config, corpus, pieces):
    normalizer, pre, post, options = config
    tok = Tokenizer(models.BPE())
    special = [a.content for a in ADDED]
    if pieces:
        tok.pre_tokenizer = pre_tokenizers.Metaspace()
        special = ["<|bos|>", "<unk>", *[f"<0x{b:02X}>" for b in range(256)], *special[1:]]
        alphabet = []
    else:
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=950 if pieces else 650, special_tokens=special,
                                                        initial_alphabet=alphabet, show_progress=False))
    data = json.loads(tok.to_str())
    data["normalizer"], data["pre_tokenizer"], data["post_processor"] = normalizer, pre, post
    data["model"].update(options)
    ids = data["model"]["vocab"]
    data["added_tokens"] = [dict(id=ids[a.content], content=a.content, single_word=a.single_word, lstrip=a.lstrip, rstrip=a.rstrip,
                                 normalized=a.normalized, special=a.special) for a in ADDED]
    return data


def main(root, out):
    rng = random.Random(20261122)
    corpus = [p.read_text() for pattern in ("docs/*.md", "router/*.go") for p in sorted(pathlib.Path(root).glob(pattern))] + [OTHER] * 20
    families = []
    for name, config in [*BYTES.items(), *PIECES.items()]:
        data = train(name, config, corpus, name in PIECES)
        tok = Tokenizer.from_str(json.dumps(data))
        texts = FIXED + list(rows(rng, 120))
        families.append({"name": name, "tokenizer": data,
                         "rows": [{"text": t, "ids": tok.encode(t).ids, "plain": tok.encode(t, add_special_tokens=False).ids} for t in texts]})
    with open(out, "wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as zipped:
        zipped.write(json.dumps({"families": families}, ensure_ascii=False, separators=(",", ":")).encode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
