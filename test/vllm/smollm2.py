"""smollm2.py GGUF DIR: the project's default model as a Hugging Face folder in bfloat16, for engines that want one.

Every weight is the quantized one's value, rounded once: the folder answers as the file does up to that rounding.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
CONTROL = 3  # token type of <|im_start|> and its like
PROBES = ["The mill race brings water.", "  tabs\tand\n\nlines ", "naïve Übermut, 漢字, 🙂", "12345 grains, 2.5e-3"]


def field(reader: Any, name: str) -> Any:
    found = reader.get_field(name)
    if found is None:
        sys.exit(f"smollm2: the file has no {name}; it is not the model this is made for")
    return found.contents()


def paired_to_halved(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF keeps the two members of a rotary pair side by side, Hugging Face half a head apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def weights(reader: Any) -> dict[str, torch.Tensor]:
    heads = {"attn_q": field(reader, "llama.attention.head_count"), "attn_k": field(reader, "llama.attention.head_count_kv")}
    out = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            _, layer, kind, _ = parts
            if kind in heads:
                values = paired_to_halved(values, heads[kind])
            name = f"model.layers.{layer}.{LAYER[kind]}.weight"
        else:
            name = f"{WHOLE[parts[0]]}.weight"
        out[name] = torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)
    return out


def tokenizer(reader: Any, folder: Path) -> None:
    if (field(reader, "tokenizer.ggml.model"), field(reader, "tokenizer.ggml.pre")) != ("gpt2", "smollm"):
        sys.exit("smollm2: the file's tokenizer is not SmolLM2's")
    tokens, kinds = field(reader, "tokenizer.ggml.tokens"), field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(m.split(" ")) for m in field(reader, "tokenizer.ggml.merges")]
    t = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    t.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    t.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    for text in PROBES:
        if t.decode(t.encode(text).ids) != text:
            sys.exit(f"smollm2: the tokenizer does not give {text!r} back")
    t.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[field(reader, "tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[field(reader, "tokenizer.ggml.eos_token_id")],
        "unk_token": tokens[field(reader, "tokenizer.ggml.unknown_token_id")],
        "pad_token": tokens[field(reader, "tokenizer.ggml.padding_token_id")],
        "model_max_length": field(reader, "llama.context_length"),
        "chat_template": field(reader, "tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1))


def config(reader: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": field(reader, "llama.embedding_length"),
        "intermediate_size": field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": field(reader, "llama.block_count"),
        "num_attention_heads": field(reader, "llama.attention.head_count"),
        "num_key_value_heads": field(reader, "llama.attention.head_count_kv"),
        "head_dim": field(reader, "llama.rope.dimension_count"),
        "vocab_size": field(reader, "llama.vocab_size"),
        "max_position_embeddings": field(reader, "llama.context_length"),
        "rms_norm_eps": round(field(reader, "llama.attention.layer_norm_rms_epsilon"), 8),
        "rope_theta": field(reader, "llama.rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": field(reader, "tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def main() -> None:
    reader, folder = gguf.GGUFReader(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer(reader, folder)
    (folder / "config.json").write_text(json.dumps(config(reader), indent=1))
    save_file(weights(reader), folder / "model.safetensors", metadata={"format": "pt"})


main()
