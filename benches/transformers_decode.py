"""Time decode steps of transformers: print {"tokens_per_s": .., "cache": "DynamicCache" or "StaticCache"}, the faster of the two, in bf16.

    python transformers_decode.py MODEL_FOLDER CONTEXT
    python transformers_decode.py llama-3.2-1b CONTEXT

Needs the packages torch and transformers. Attention is PyTorch's own (`sdpa`). The second form draws random weights of the shape, as
`kvsmith bench decode --shapes` does. The cache is filled with random rows; a step reads all of them.
"""

import json
import os
import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache
from transformers.utils import logging

# Layers, hidden channels, channels of the MLP, query heads, KV heads, channels per head, vocabulary.
SHAPES = {"llama-3.2-1b": (16, 2048, 8192, 32, 8, 64, 128_256)}


def main():
    source, context = sys.argv[1], int(sys.argv[2])
    logging.set_verbosity_error()
    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count())
    model = drawn(SHAPES[source], context) if source in SHAPES else AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.eval()
    runs, each = (6, 10) if context < 1 << 15 else (3, 3)
    rates = {}
    for kind in (DynamicCache, StaticCache):
        with torch.inference_mode():
            rates[kind.__name__] = timed(model, kind, context, runs, each)
    best = max(rates, key=rates.get)
    print(json.dumps({"tokens_per_s": rates[best], "cache": best, "each": rates}))


def drawn(shape, context):
    """Return a model of a shape with random weights."""
    layers, hidden, mlp, heads, kv_heads, channels, vocabulary = shape
    config = LlamaConfig(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=mlp, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=channels,
                         vocab_size=vocabulary, tie_word_embeddings=True, max_position_embeddings=context + 1024)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")


def timed(model, kind, context, runs, each):
    """Return tokens per second with a kind of cache: the median over runs."""
    config = model.config
    room = context + runs * each + 1
    cache = DynamicCache() if kind is DynamicCache else StaticCache(config=config, max_cache_len=room)
    shape = (1, config.num_key_value_heads, context, config.head_dim)
    for layer in range(config.num_hidden_layers):
        keys, values = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(2))
        cache.update(keys, values, layer, {"cache_position": torch.arange(context)})
    position, times, token = context, [], torch.tensor([[1000]])

    def step():
        nonlocal position, token
        logits = model(token, past_key_values=cache, cache_position=torch.tensor([position]), use_cache=True).logits
        token, position = logits[:, -1].argmax(-1, keepdim=True), position + 1

    step()
    for _ in range(runs):
        start = time.perf_counter()
        for _ in range(each):
            step()
        times.append((time.perf_counter() - start) / each)
    if cache.get_seq_length() != position:
        sys.exit(f"error: the cache of transformers has {cache.get_seq_length()} positions after step {position}")
    return 1 / statistics.median(times)


if __name__ == "__main__":
    main()
