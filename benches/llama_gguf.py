"""Write the real model as a GGUF file with weights in bf16 or Q8_0, from the file that `make real` fetched.

    python llama_gguf.py REAL bf16|q8 OUTPUT

The metadata are those of the fetched file; its Q4_1 weights are those of REAL/model before they were rounded to bf16. Needs the package
gguf. llama.cpp runs the file; benches/decode_peers.py makes it.
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


def main():
    real, name, output = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    [source] = (real / "gguf").glob("*.gguf")
    reader, (kind, file_type) = GGUFReader(source), TYPES[name]
    part = output.with_suffix(".part")
    writer = GGUFWriter(part, reader.fields["general.architecture"].contents())
    writer.add_file_type(file_type)
    for field in reader.fields.values():
        if field.name not in OWN:
            element = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
    for tensor in reader.tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, output)


if __name__ == "__main__":
    main()
