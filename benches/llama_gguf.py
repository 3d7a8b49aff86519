"""Write the real model, or a shape with random weights, as a GGUF file with weights in bf16 or Q8_0.

    python llama_gguf.py REAL bf16|q8 OUTPUT [SHAPE]

The real model comes from the file that `make real` fetched: its metadata, and its Q4_1 weights, which are those of REAL/model before
they were rounded to bf16. A shape has the tokens of that file, and others to fill its vocabulary. Needs the package gguf.
llama.cpp runs the file; benches/decode_peers.py makes it.
"""

import os
import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

TYPES = {"bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16), "q8": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0)}
# Metadata that the writer makes itself.
OWN = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", "general.file_type")
# Layers, hidden channels, channels of the MLP, query heads, KV heads, channels per head, vocabulary; the embedding is also the output
# projection. As in `kvsmith bench decode --shapes`.
SHAPES = {
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, 151_936),
    "llama-3.2-1b": (16, 2048, 8192, 32, 8, 64, 128_256),
    "qwen3-4b": (36, 2560, 9728, 32, 8, 128, 151_936),
}
CONTEXT = 1 << 18


def main():
    real, name, output = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    [source] = (real / "gguf").glob("*.gguf")
    reader, (kind, file_type) = GGUFReader(source), TYPES[name]
    shape = SHAPES[sys.argv[4]] if len(sys.argv) > 4 else None
    part = output.with_suffix(".part")
    writer = GGUFWriter(part, reader.fields["general.architecture"].contents())
    writer.add_file_type(file_type)
    own = described(shape, reader) if shape else {}
    for field in reader.fields.values():
        if field.name not in OWN:
            element = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, own.get(field.name, field.contents()), field.types[0], sub_type=element)
    if shape:
        # Of the channels per head, which need not be the hidden channels over the heads, the file of `make real` says nothing.
        writer.add_key_length(shape[5])
        writer.add_value_length(shape[5])
    for tensor, values in drawn(shape) if shape else stored(reader):
        if values.ndim < 2:
            writer.add_tensor(tensor, values)
        else:
            writer.add_tensor(tensor, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, output)


def stored(reader):
    """Yield the tensors of a file, widened."""
    for tensor in reader.tensors:
        yield tensor.name, np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)


def described(shape, reader):
    """Return the metadata of a shape that differ from those of the file."""
    layers, hidden, mlp, heads, kv_heads, channels, vocabulary = shape
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    more = vocabulary - len(tokens)
    return {
        "general.name": sys.argv[4], "llama.block_count": layers, "llama.embedding_length": hidden, "llama.feed_forward_length": mlp, "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads, "llama.rope.dimension_count": channels, "llama.vocab_size": vocabulary,
        "llama.context_length": CONTEXT, "tokenizer.ggml.tokens": tokens + [f"<unused {i}>" for i in range(more)],
        "tokenizer.ggml.token_type": types + [5] * more,
    }


def drawn(shape):
    """Yield the tensors of a shape, with random weights that keep the scale of what they multiply."""
    layers, hidden, mlp, heads, kv_heads, channels, vocabulary = shape
    random = np.random.default_rng(0)

    def weight(rows, columns):
        return random.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)

    yield "token_embd.weight", weight(vocabulary, hidden)
    yield "output_norm.weight", np.ones(hidden, dtype=np.float32)
    for i in range(layers):
        yield f"blk.{i}.attn_norm.weight", np.ones(hidden, dtype=np.float32)
        yield f"blk.{i}.ffn_norm.weight", np.ones(hidden, dtype=np.float32)
        yield f"blk.{i}.attn_q.weight", weight(heads * channels, hidden)
        yield f"blk.{i}.attn_k.weight", weight(kv_heads * channels, hidden)
        yield f"blk.{i}.attn_v.weight", weight(kv_heads * channels, hidden)
        yield f"blk.{i}.attn_output.weight", weight(hidden, heads * channels)
        yield f"blk.{i}.ffn_gate.weight", weight(mlp, hidden)
        yield f"blk.{i}.ffn_up.weight", weight(mlp, hidden)
        yield f"blk.{i}.ffn_down.weight", weight(hidden, mlp)


if __name__ == "__main__":
    main()
