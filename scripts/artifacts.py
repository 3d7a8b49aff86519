"""Artifacts of kvsmith read, changed and written, as docs/reference/artifact.md describes them."""

import hashlib
import json
import struct

import numpy as np
from safetensors import safe_open

NAMES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.uint32): "U32", np.dtype(np.uint64): "U64", np.dtype(np.uint8): "U8"}


def read_tensors(path):
    """Return the tensors of a safetensors file by name, and its metadata."""
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()


def read_artifact(path):
    """Return the tensors of an artifact by name, and its manifest."""
    tensors, metadata = read_tensors(path)
    return tensors, json.loads(metadata["kvsmith"])


def artifact_bytes(tensors, manifest):
    """Return the bytes of an artifact with these tensors and this manifest."""
    for section in manifest["sections"].values():
        section["sha256"] = {name: hashlib.sha256(np.ascontiguousarray(tensors[name]).tobytes()).hexdigest() for name in section["sha256"] if name in tensors}
    manifest = {key: value for key, value in manifest.items() if key != "manifest_sha256"}

    def text(value):
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    digest = hashlib.sha256(text(manifest).encode()).hexdigest()
    sealed = text(manifest | {"manifest_sha256": digest})
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header, at = {"__metadata__": {"kvsmith": sealed}}, 0
    for name in order:
        tensor = tensors[name]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    head = text(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + b"".join(np.ascontiguousarray(tensors[name]).tobytes() for name in order)


def of_sections(path, sections):
    """Return the tensors and the manifest of some sections of an artifact."""
    tensors, manifest = read_artifact(path)
    tensors = {name: tensor for name, tensor in tensors.items() if name.split(".")[0] in sections}
    for key in ("sections", "quality"):
        manifest[key] = {name: value for name, value in manifest[key].items() if name in sections}
    return tensors, manifest


def keep_sections(path, output, sections):
    """Write an artifact with some sections of another."""
    output.write_bytes(artifact_bytes(*of_sections(path, sections)))
