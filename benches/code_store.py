"""Measures whether the codes of `wpq` can be part of the cache itself: keys as 64 bits of codes and a 2-bit residual.

    python benches/code_store.py KVSMITH REAL [--layers 9,21]

Texts and fits are those of benches/index_search.py. For several forms of the keys, around their mean, the script writes the bits
per key and the errors to docs/results/code-store.json: the squared error of the scores of 12 queries per block, divided by the
variance of the scores of a query, for each head and block. The forms are:

    2, 3 and 4 bits     bits per channel, with the smallest value and the step in f16 for every 32 channels of a key
    sign and 2 bits     a sign, and 2 bits for the magnitude divided by the largest magnitude of the channel, quantised
                        in the same way; `--kv 2bit` stores this form
    codes               the codes of `wpq`, 64 bits
    codes and 2 bits    the codes, and 2 bits per channel for the residual of the key, in the channels of the key (k) or
                        in those of the quantiser (z)

Needs numpy and faiss-cpu.
"""

import numpy as np

from index_search import CONTEXT, STEPS, Lab, Quantiser, Space, arguments, blocks_of, documents, dumps, rotate, tensors

GROUP = 32


def rounded(x, bits):
    """Rounds rows [n, d] to 2^bits levels between the smallest and the largest value of every GROUP channels, in f16."""
    groups = x.reshape(len(x), -1, GROUP)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    step = ((high - low) / (2**bits - 1)).astype(np.float16).astype(np.float32)
    low = low.astype(np.float16).astype(np.float32)
    levels = np.clip(np.rint((groups - low) / np.maximum(step, 1e-12)), 0, 2**bits - 1)
    return (low + levels * step).reshape(x.shape)


def signed(x, bits):
    """Rounds rows [n, d] to signs about the channel's median and magnitudes, relative to its largest, at 2^bits levels."""
    center = np.median(x, 0)
    left = x - center
    scale = np.abs(left).max(0)
    return center + np.where(left > 0, 1, -1) * scale * rounded(np.abs(left) / scale, bits)


def forms(keys, space, quantiser):
    """Yields each form: its name, bits per key, and the keys as they are read back."""
    d = keys.shape[1]
    header = d // GROUP * 32
    for bits in (2, 3, 4):
        yield f"{bits} bits", bits * d + header, rounded(keys, bits)
    yield "sign and 2 bits", 3 * d + header, signed(keys, 2)
    left = space.z(keys)
    of_codes = left.copy()
    for stage in quantiser.stages:
        quantiser.encode_stage(left, stage)
    of_codes -= left
    back = np.linalg.inv(space.keys)
    coarse = of_codes @ back + space.mean
    yield "codes", 64, coarse
    size = 64 + 2 * d + header
    yield "codes and 2 bits in k", size, coarse + rounded(keys - coarse, 2)
    yield "codes and 2 bits in z", size, (of_codes + rounded(left, 2)) @ back + space.mean


def errors(keys, read, queries):
    """Returns the mean squared error of the scores of queries [r, steps, d], divided by the variance of the scores."""
    scores = queries @ keys.T
    return ((queries @ (read - keys).T).var(-1) / scores.var(-1)).mean()


def main():
    args = arguments(__doc__)
    lab = Lab(args.kvsmith, args.real)
    args.calib, args.other = dumps(lab)
    calib, other = (tensors(path / "tokens.safetensors") for path in (args.calib, args.other))
    moments = tensors(args.calib / "moments.safetensors")
    fit = calib["held_out"] == 0
    found, sizes = {}, {}
    for layer in (int(x) for x in args.layers.split(",")):
        own, theirs = (tensors(path / f"layer-{layer:05d}.safetensors") for path in (args.calib, args.other))
        heads = own["k_pre"].shape[0]
        group = theirs["q_pre"].shape[0] // heads
        for head in range(heads):
            keys = rotate(own["k_pre"][head], calib["position"].astype(np.float32), args.theta)[fit]
            space = Space(keys, moments["sum_qq_rope"][layer, head] / moments["count"][layer, head])
            quantiser = Quantiser(space, keys, 8, 16, stages=2)
            for start, end in blocks_of(other):
                at = other["position"][start:end].astype(np.float32)
                k = rotate(theirs["k_pre"][head, start:end], at, args.theta)
                q = rotate(theirs["q_pre"][head * group : (head + 1) * group, start:end], at, args.theta)
                steps = np.linspace((end - start) // 2, end - start - 1, STEPS).astype(int)
                for name, size, read in forms(k, space, quantiser):
                    found.setdefault(name, []).append(errors(k, read, q[:, steps]))
                    sizes[name] = size
    rows = [{"form": name, "bits": sizes[name], "errors": errors} for name, errors in found.items()]
    documents.save("code-store", {"table": "code-store", "program": lab.commit(), "text": "development", "length": CONTEXT,
                                  "calibration": lab.fits, "layers": args.layers, "rows": rows})


if __name__ == "__main__":
    main()
