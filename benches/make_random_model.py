#!/usr/bin/env python3
"""Write a Hugging Face llama checkpoint with random bf16 weights in the shape of a real model.

The model serves to measure memory and speed without a download; its output is meaningless. The script needs only Python.
Writing the 16 GB of an 8B model is limited by the disk. Example: python3 benches/make_random_model.py 1b /tmp/random-1b
"""

import argparse
import json
import math
import random
from array import array
from pathlib import Path

LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# layers, hidden, intermediate, query heads, KV heads, head_dim, vocabulary, tied embeddings
SHAPES = {
    "tiny": (4, 256, 1024, 8, 2, 32, 4096, True),
    "135m": (30, 576, 1536, 9, 3, 64, 49152, True),
    "1b": (16, 2048, 8192, 32, 8, 64, 128256, True),
    "8b": (32, 4096, 14336, 32, 8, 128, 128256, False),
}
# Normal numbers drawn. A prime, so that rows, which repeat these numbers, each begin at a different one.
DRAWN = 2_097_169


def tensors(shape):
    layers, hidden, inter, heads, kv_heads, dim, vocab, tied = shape
    yield "model.embed_tokens.weight", (vocab, hidden)
    for i in range(layers):
        p = f"model.layers.{i}."
        yield p + "input_layernorm.weight", (hidden,)
        yield p + "post_attention_layernorm.weight", (hidden,)
        yield p + "self_attn.q_proj.weight", (heads * dim, hidden)
        yield p + "self_attn.k_proj.weight", (kv_heads * dim, hidden)
        yield p + "self_attn.v_proj.weight", (kv_heads * dim, hidden)
        yield p + "self_attn.o_proj.weight", (hidden, heads * dim)
        yield p + "mlp.gate_proj.weight", (inter, hidden)
        yield p + "mlp.up_proj.weight", (inter, hidden)
        yield p + "mlp.down_proj.weight", (hidden, inter)
    yield "model.norm.weight", (hidden,)
    if not tied:
        yield "lm_head.weight", (vocab, hidden)


def bf16(values):
    """Returns floats as little-endian bf16, truncated."""
    wide = array("f", values).tobytes()
    out = bytearray(len(wide) // 2)
    out[0::2], out[1::2] = wide[2::4], wide[3::4]
    return bytes(out)


class Weights:
    """Writes matrices of variance 1 / inputs, which repeat the same normal numbers from a random start."""

    def __init__(self, rng):
        self.rng = rng
        self.normal = [rng.gauss(0.0, 1.0) for _ in range(DRAWN)]
        self.scaled = {}

    def write(self, file, rows, cols):
        if cols not in self.scaled:
            scale = 1.0 / math.sqrt(cols)
            # Stored twice, so that a whole round can start anywhere.
            self.scaled[cols] = memoryview(bf16([v * scale for v in self.normal]) * 2)
        left, first = 2 * rows * cols, 2 * self.rng.randrange(DRAWN)
        round_of = self.scaled[cols][first : first + 2 * DRAWN]
        while left > 0:
            left -= file.write(round_of[: min(left, len(round_of))])


def shape_of(text):
    """Returns a named shape, or one given by its numbers, with tied embeddings."""
    if text in SHAPES:
        return SHAPES[text]
    numbers = tuple(int(number) for number in text.split(","))
    if len(numbers) != 7 or min(numbers) < 1:
        raise ValueError(text)
    return (*numbers, True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "shape", type=shape_of, metavar="SHAPE",
        help=f"{', '.join(SHAPES)}, or layers,hidden,intermediate,heads,kv_heads,head_dim,vocabulary",
    )
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--tokens", type=int, default=4096, help="number of random tokens in tokens.json")
    parser.add_argument("--layers", type=int, help="number of layers, in place of that of the shape")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers")
    args = parser.parse_args()
    shape = args.shape
    if args.layers:
        shape = (args.layers, *shape[1:])
    layers, hidden, inter, heads, kv_heads, dim, vocab, tied = shape
    rng = random.Random(args.seed)
    args.folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inter,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim,
        "vocab_size": vocab, "tie_word_embeddings": tied, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE,
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }
    (args.folder / "config.json").write_text(json.dumps(config, indent=1))

    header, at = {}, 0
    for name, size in tensors(shape):
        end = at + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    weights = Weights(rng)
    with open(args.folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, size in tensors(shape):
            if len(size) == 1:
                file.write(bf16([1.0] * size[0]))
            else:
                weights.write(file, *size)
    ids = [rng.randrange(3, vocab) for _ in range(args.tokens)]
    (args.folder / "tokens.json").write_text(json.dumps([ids]))
    print(f"{args.folder}: {at / 1e9:.2f} GB of weights, {args.tokens} tokens in tokens.json")


if __name__ == "__main__":
    main()
