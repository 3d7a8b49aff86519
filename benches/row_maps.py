"""Measures maps of keys and values before they are rounded to 4 and 2 bits: the maps of `kvsmith rotation`, and others.

    python benches/row_maps.py KVSMITH REAL [--layers 9,21]

Maps are fitted to the Python documentation and UUIDs, and measured on development text of the handbook. The script writes to
docs/results/row-maps.json, for every map and number of bits, the squared error of the output of full attention, divided by the
squared norm of the output, for each head and block: the mean of 12 queries per block. Either the keys are rounded or the values.
Rounding is that of `--kv int4` and `int2`; the first 4 rows and the last 64 before a query are exact. S is the mean of q^T q of
rotated queries, C the covariance of rotated keys, m their mean, H a Hadamard matrix. Keys are mapped as (k - m) A, or k A:

    none                A = I
    hadamard            A = H
    hadamard, mean      A = H, around m
    oscar               A = U H, with the eigenvectors U of S
    balanced            A = L U D^-1/4 H, around m, with S = L L^T and L^T C L = U D U^T: the default of `kvsmith rotation`
    balanced, no mean   the same with E k^T k in place of C
    balanced, ridge X   the same as balanced, with X in place of 0.1 times the mean eigenvalue added to C
    balanced, attended  the same as balanced, where half of C is of keys weighted by the mean squared attention that they get

Values are mapped as v A:

    none, hadamard      as above
    oscar               A = U H, with the eigenvectors U of the mean of w v^T v, w = k S k^T
    attended            the same, with w the mean squared attention that the value gets: the default of `kvsmith rotation`
    attended, mean      the same around the mean value, with these weights
    balanced            A = L U D^-1/4 H, with L L^T = I and the moment of `attended`

`clip X` cuts rows to a part X of their range first. Three forms are those of others, keys and values alike:

    q8_0, q4_0          of llama.cpp, computed by its package gguf, after a Hadamard rotation: a scale per 32 channels
    kivi                2 bits (arXiv 2402.02750): keys with smallest value and step in f16 per channel and 32 positions,
                        values per position and 32 channels

Needs numpy, gguf and faiss-cpu.
"""

import gguf
import numpy as np

from index_search import BLOCKS, CONTEXT, MIXED, STEPS, TOKENS, Lab, arguments, blocks_of, documents, rotate, softmax, tensors
from lab import require_apart

SINKS, WINDOW = 4, 64
QUERY_RIDGE, KEY_RIDGE = 1e-4, 0.1
GROUP = 64
# Part of the range that codes span, by bits: as `int4` and `int2` have it; and other parts.
CLIP = {4: 0.97, 2: 0.8}
OTHER_CLIPS = {4: (0.94, 0.9), 2: (0.9, 0.7, 0.6)}
# Queries per block from which the weights of `attended` are computed.
SAMPLED = 64


def hadamard(d):
    """Returns the Hadamard matrix of a power of two."""
    h = np.ones((1, 1))
    while len(h) < d:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(d)


def rounded(x, bits, clip):
    """Rounds rows [n, d] as `int4` and `int2` do: scale and offset in f16 per GROUP channels."""
    groups = x.reshape(len(x), -1, min(GROUP, x.shape[1]))
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    middle, reach = (low + high) / 2, (high - low) / 2 * clip
    low, high = (middle - reach).astype(np.float16).astype(np.float32), middle + reach
    step = np.maximum(((high - low) / (2**bits - 1)).astype(np.float16).astype(np.float32), 1e-12)
    return (low + np.clip(np.rint((groups - low) / step), 0, 2**bits - 1) * step).reshape(x.shape)


def mapped(x, mean, a, bits, clip=1.0):
    """Returns rows [n, d] as they are read back."""
    inner = ((x - mean) @ a).astype(np.float32)
    return (rounded(inner, bits, clip) @ np.linalg.inv(a) + mean).astype(np.float32)


def ridged(moment, ridge):
    """Returns a moment with a mean eigenvalue of 1, plus a ridge."""
    d = len(moment)
    return moment / (np.trace(moment) / d) + ridge * np.eye(d)


def axes(moment):
    """Returns eigenvalues, the largest first, and eigenvectors as columns."""
    values, vectors = np.linalg.eigh(moment)
    return values[::-1], vectors[:, ::-1]


def balanced(s, c, ridge=KEY_RIDGE):
    """Returns L U D^-1/4 H."""
    factor = np.linalg.cholesky(ridged(s, QUERY_RIDGE))
    values, vectors = axes(factor.T @ ridged(c, ridge) @ factor)
    return factor @ vectors @ np.diag(values**-0.25) @ hadamard(len(s))


def key_forms(keys, s, attended, bits):
    """Yields the name of each form of the keys, what is subtracted, the map and the clip ratio."""
    d = keys.shape[1]
    h, mean, wide = hadamard(d), keys.mean(0), keys.astype(np.float64)
    c, second = np.cov(wide.T, bias=True), wide.T @ wide / len(wide)
    clip = CLIP[bits]
    yield "none", 0, np.eye(d), 1.0
    yield "hadamard", 0, h, 1.0
    yield f"hadamard, clip {clip}", 0, h, clip
    yield f"hadamard, mean, clip {clip}", mean, h, clip
    yield "oscar", 0, axes(s)[1] @ h, 1.0
    yield f"oscar, clip {clip}", 0, axes(s)[1] @ h, clip
    yield "balanced", mean, balanced(s, c), 1.0
    yield f"balanced, clip {clip}", mean, balanced(s, c), clip
    yield f"balanced, no mean, clip {clip}", 0, balanced(s, second), clip
    weighted = np.cov(wide.T, bias=True, aweights=attended)
    yield f"balanced, attended, clip {clip}", mean, balanced(s, c / np.trace(c) + weighted / np.trace(weighted)), clip
    for other in OTHER_CLIPS[bits]:
        yield f"balanced, clip {other}", mean, balanced(s, c), other
    for ridge in (1e-4, 1.0):
        yield f"balanced, ridge {ridge:g}, clip {clip}", mean, balanced(s, c, ridge), clip


def value_forms(values, keys, s, attended, bits):
    """Yields the name of each form of the values, what is subtracted, the map and the clip ratio."""
    d = values.shape[1]
    h, wide = hadamard(d), values.astype(np.float64)
    weights = np.einsum("ni,ij,nj->n", keys, s, keys)
    of_oscar = (wide * (weights / weights.mean())[:, None]).T @ wide / len(wide)
    of_attended = (wide * attended[:, None]).T @ wide
    center = attended @ wide / attended.sum()
    around = ((wide - center) * attended[:, None]).T @ (wide - center)
    own = axes(of_attended)[1] @ h
    yield "none", 0, np.eye(d), 1.0
    yield "hadamard", 0, h, 1.0
    for clip in (CLIP[bits], *OTHER_CLIPS[bits]):
        yield f"hadamard, clip {clip}", 0, h, clip
    yield "oscar", 0, axes(of_oscar)[1] @ h, 1.0
    yield f"oscar, clip {CLIP[bits]}", 0, axes(of_oscar)[1] @ h, CLIP[bits]
    yield "attended", 0, own, 1.0
    for clip in (CLIP[bits], *OTHER_CLIPS[bits]):
        yield f"attended, clip {clip}", 0, own, clip
    yield f"attended, mean, clip {CLIP[bits]}", center, axes(around)[1] @ h, CLIP[bits]
    for form, clip in (("balanced", 1.0), (f"balanced, clip {CLIP[bits]}", CLIP[bits])):
        yield form, 0, balanced(np.eye(d), of_attended), clip


def of_others(keys, values, bits):
    """Yields the names of other forms with keys and values as they are read back."""
    h = hadamard(keys.shape[1])
    for name, kind in (("q8_0", gguf.GGMLQuantizationType.Q8_0), ("q4_0", gguf.GGMLQuantizationType.Q4_0)):
        def read(x):
            packed = gguf.quants.quantize((x @ h).astype(np.float32), kind)
            return (gguf.quants.dequantize(packed, kind) @ h).astype(np.float32)

        if bits == 4:
            yield name, read(keys), read(values)
    if bits == 2:
        yield "kivi", in_groups(keys.T, 2).T, in_groups(values, 2)


def in_groups(x, bits, group=32):
    """Rounds rows [n, m] to levels between the smallest and the largest value of every `group` columns, in f16; columns beyond the
    last group stay as they are."""
    whole = x.shape[1] // group * group
    groups = x[:, :whole].reshape(len(x), -1, group)
    low = groups.min(-1, keepdims=True).astype(np.float16).astype(np.float32)
    step = np.maximum(((groups.max(-1, keepdims=True) - low) / (2**bits - 1)).astype(np.float16).astype(np.float32), 1e-12)
    read = low + np.clip(np.rint((groups - low) / step), 0, 2**bits - 1) * step
    return np.concatenate([read.reshape(len(x), whole), x[:, whole:]], 1)


def attention(queries, keys, steps):
    """Returns the weights of queries [r, steps, d] at the positions `steps`."""
    scores = queries @ keys.T / np.sqrt(keys.shape[1])
    return softmax(np.where(np.arange(len(keys)) <= steps[:, None], scores, -np.inf))


def output(queries, keys, values, steps):
    return attention(queries, keys, steps) @ values


def error(queries, exact, read, steps):
    """Returns the relative squared error of the output with rows as they are read back, except sinks and window."""
    expected = output(queries, *exact, steps)
    found = np.empty_like(expected)
    for i, step in enumerate(steps):
        rows = [of.copy() for of in read]
        for own, of in zip(rows, exact):
            own[:SINKS], own[step + 1 - WINDOW : step + 1] = of[:SINKS], of[step + 1 - WINDOW : step + 1]
        found[:, i] = output(queries[:, i : i + 1], *rows, steps[i : i + 1])[:, 0]
    return (((found - expected) ** 2).sum(-1) / (expected**2).sum(-1)).mean()


def attended_by(queries, keys, starts):
    """Returns the sum of squared attention of each row, window and sinks aside, over some queries [r, n, d] of each block."""
    total = np.zeros(len(keys))
    for start, end in starts:
        steps = np.linspace((end - start) // 2, end - start - 1, SAMPLED).astype(int)
        weights = attention(queries[:, start:end][:, steps], keys[start:end], steps)
        far = (np.arange(end - start) <= steps[:, None] - WINDOW) & (np.arange(end - start) >= SINKS)
        total[start:end] = ((weights * far) ** 2).sum((0, 1))
    return total


def dumps(lab):
    """Returns the dump that maps are fitted to, which is that of `make results-row-formats`, and that of other text."""
    fitted = lab.corpus("for-handbook", {"python": 1 - MIXED["uuid"], "uuid": MIXED["uuid"]}, TOKENS)
    lab.checked(fitted, lab.section(fitted, "for-handbook-rotation-rotation-form-balanced", "rotation", ["--rotation-form", "balanced"]))
    require_apart(lab.fits, "handbook")
    other = lab.documents("maps", lab.blocks("handbook", CONTEXT, BLOCKS, "development"), ("--seq-len", CONTEXT, "--holdout", 0))
    return lab.dump(fitted), lab.dump(other, "values", ("--queries", "--values"))


def main():
    args = arguments(__doc__)
    lab = Lab(args.kvsmith, args.real)
    calib_dump, other_dump = dumps(lab)
    calib, other = (tensors(path / "tokens.safetensors") for path in (calib_dump, other_dump))
    moments = tensors(calib_dump / "moments.safetensors")
    fit = (calib["held_out"] == 0) & (calib["position"] >= SINKS)
    found = {}
    for layer in (int(x) for x in args.layers.split(",")):
        own, theirs = (tensors(path / f"layer-{layer:05d}.safetensors") for path in (calib_dump, other_dump))
        heads = own["k_pre"].shape[0]
        group = theirs["q_pre"].shape[0] // heads
        at = calib["position"].astype(np.float32)
        for head in range(heads):
            keys = rotate(own["k_pre"][head], at, args.theta)
            queries = rotate(own["q_pre"][head * group : (head + 1) * group], at, args.theta)
            weights = attended_by(queries, keys, blocks_of(calib))[fit].astype(np.float64)
            keys, values = keys[fit], own["v"][head][fit]
            s = moments["sum_qq_rope"][layer, head] / moments["count"][layer, head]
            for start, end in blocks_of(other):
                own_at = other["position"][start:end].astype(np.float32)
                k = rotate(theirs["k_pre"][head, start:end], own_at, args.theta)
                v = theirs["v"][head, start:end].astype(np.float32)
                q = rotate(theirs["q_pre"][head * group : (head + 1) * group, start:end], own_at, args.theta)
                steps = np.linspace((end - start) // 2, end - start - 1, STEPS).astype(int)
                for bits in (4, 2):
                    for name, mean, a, clip in key_forms(keys, s, weights, bits):
                        e = error(q[:, steps], (k, v), (mapped(k, mean, a, bits, clip), v), steps)
                        found.setdefault(("keys", bits, name), []).append(e)
                    for name, mean, a, clip in value_forms(values, keys, s, weights, bits):
                        e = error(q[:, steps], (k, v), (k, mapped(v, mean, a, bits, clip)), steps)
                        found.setdefault(("values", bits, name), []).append(e)
                    for name, own_k, own_v in of_others(k, v, bits):
                        for rows, read in (("keys", (own_k, v)), ("values", (k, own_v))):
                            found.setdefault((rows, bits, name), []).append(error(q[:, steps], (k, v), read, steps))
    rows = [{"rows": rows, "bits": bits, "map": name, "errors": errors} for (rows, bits, name), errors in found.items()]
    documents.save("row-maps", {"table": "row-maps", "program": lab.commit(), "text": "development", "length": CONTEXT,
                                "calibration": lab.fits, "layers": args.layers, "rows": rows})


if __name__ == "__main__":
    main()
