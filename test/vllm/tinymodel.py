"""tinymodel.py DIR [WINDOW]: a Llama of about a million random weights and a byte-level tokenizer, the same bytes every time.

With WINDOW three of five layers look back over so many tokens alone, so that vLLM keeps the layers in groups: one of two layers
that keep all tokens, and with a window one of two and one of a single layer, beside which a layer's room stays empty.

It answers nonsense, quickly and reproducibly: tests compare answers, they do not read them. Weights are large enough for
the attention to look at the whole prompt, so that a block of wrong KV shows in the first token.
"""

import json
import random
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCABULARY, CONTEXT = 128, 4, 2, 32, 256, 1024, 4096
LAYERS = 4
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROBES = ["The mill race brings water.", "  tabs\tand\n\nlines ", "naïve Übermut, 漢字, 🙂", "x = {'a': [1, 2.5e-3]}  # ok"]


def corpus() -> list[str]:
    """Words from syllables: enough to learn merges from, and nobody's text."""
    pick = random.Random(20261121)
    syllables = [a + b for a in "b ch d f g k l m n p r s st t tr w".split() for b in "a e i o u ai er in on".split()]
    words = ["".join(pick.choices(syllables, k=pick.randint(1, 3))) for _ in range(2000)]
    return [" ".join(pick.choices(words, k=12)) + pick.choice(".,?!") for _ in range(2000)]


def tokenizer(folder: Path) -> None:
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    t.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    )
    if t.get_vocab_size() != VOCABULARY:
        sys.exit(f"tinymodel: the tokenizer has {t.get_vocab_size()} tokens, want {VOCABULARY}")
    for text in PROBES:
        if t.decode(t.encode(text).ids) != text:
            sys.exit(f"tinymodel: the tokenizer does not give {text!r} back")
    t.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": CONTEXT,
        "chat_template": CHAT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1))


def weights(layers: int) -> dict[str, torch.Tensor]:
    seed = torch.Generator().manual_seed(0)

    def draw(rows: int, columns: int, scale: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=seed) * scale).to(torch.bfloat16)

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    w = {
        "model.embed_tokens.weight": draw(VOCABULARY, HIDDEN, 1.0),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": draw(VOCABULARY, HIDDEN, 0.3),
    }
    for i in range(layers):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN, 0.15),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN, 0.15),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN, 0.15),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM, 0.15),
            "mlp.gate_proj": (INNER, HIDDEN, 0.08),
            "mlp.up_proj": (INNER, HIDDEN, 0.08),
            "mlp.down_proj": (HIDDEN, INNER, 0.08),
        }
        for name, shape in shapes.items():
            w[f"model.layers.{i}.{name}.weight"] = draw(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            w[f"model.layers.{i}.{name}.weight"] = ones.clone()
    return w


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer(folder)
    mixed = {"layer_types": MIXED, "sliding_window": int(sys.argv[2])} if len(sys.argv) > 2 else {}
    layers = len(MIXED) if mixed else LAYERS
    about = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        **mixed,
    }
    (folder / "config.json").write_text(json.dumps(about, indent=1))
    save_file(weights(layers), folder / "model.safetensors", metadata={"format": "pt"})


main()
