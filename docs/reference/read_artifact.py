#!/usr/bin/env python3
"""Read a kvsmith artifact with safetensors and numpy: check it, then encode and score a few keys.

Usage: read_artifact.py ART.safetensors [keys.json]

With keys.json ({"layer", "head", "keys", "queries", "keys_rope", "queries_rope", "rope_inv_freq", "query_head",
"offsets"}) it prints, as JSON: the a2ats code of each key and the score of each query and key in each bucket of distances
(one without buckets); the wpq code of each key, per stage and group, and the score of each query and key, from keys and
queries after rotation; the LFPS prior of the query head, its scalars and its mean attention mass at each offset; and
the shift of its tail, null without one. From an artifact with the sections of peers also: the doublesparsity score of
each query and key, by 4 channels, and the triattention score of each key for the query head.
"""

import hashlib
import json
import sys

import numpy as np
from safetensors import safe_open


def check(tensors, text):
    """Every digest in the manifest; returns the manifest."""
    manifest = json.loads(text)
    seal = manifest["manifest_sha256"]
    unsealed = text.replace(f'"manifest_sha256":"{seal}",', "", 1)
    assert hashlib.sha256(unsealed.encode()).hexdigest() == seal, "the manifest was altered"
    assert manifest["format"] in (1, 2), "another format"
    for section in manifest["sections"].values():
        for name, digest in section["sha256"].items():
            data = np.ascontiguousarray(tensors[name]).tobytes()
            assert hashlib.sha256(data).hexdigest() == digest, f"{name} was altered"
    return manifest


def encode(tensors, layer, head, keys):
    """Codes of keys before rotation: [n, d] to [n]."""
    z = keys @ tensors["a2ats.chol"][layer, head] - tensors["a2ats.mean"][layer, head]
    codebook = tensors["a2ats.codebook"][layer, head].astype(np.float64)
    return ((z[:, None, :] - codebook[None]) ** 2).sum(-1).argmin(-1)


def turns(params, inv_freq):
    """What a query's pairs of channels are multiplied by, per bucket of distances: [8, d/2]; [1, d/2] without buckets."""
    if "distance_buckets" not in params:
        return np.exp(1j * params["wrope_position"] * inv_freq)[None]
    edges = params["distance_buckets"]["edges"]
    means = [np.exp(1j * np.outer(np.arange(low, high), inv_freq)).mean(0) for low, high in zip(edges, edges[1:])]
    return np.array(means)


def scores(tensors, layer, head, queries, turns):
    """Score of every codeword for queries before rotation, in every bucket: [r, d] to [buckets, r, M]."""
    half = queries.shape[1] // 2
    pairs = (queries[:, :half] + 1j * queries[:, half:]) * turns[:, None]
    rotated = np.concatenate([pairs.real, pairs.imag], -1)
    chol = tensors["a2ats.chol"][layer, head].astype(np.float64)
    y = np.linalg.solve(chol, rotated.swapaxes(1, 2)).swapaxes(1, 2)
    return y @ (tensors["a2ats.codebook"][layer, head].astype(np.float64) + tensors["a2ats.mean"][layer, head]).T


def deal(u, groups, width):
    """Channels of the groups: [n, d] to [n, m, width], channel j + i m as channel i of group j, or 0 beyond d."""
    n, d = u.shape
    used = min(d, width * groups)
    padded = np.pad(u[:, :used], ((0, 0), (0, width * groups - used)))
    return padded.reshape(n, width, groups).swapaxes(1, 2)


def mean_path(tensors, layer, head, n, inv_freq):
    """The mean before rotation at positions 0 to n - 1, [n, d]; 0 in artifacts without it."""
    if "wpq.mean_pre" not in tensors:
        return np.zeros((n, tensors["wpq.mean"].shape[-1]))
    low, high = np.split(tensors["wpq.mean_pre"][layer, head].astype(np.float64), 2)
    cos, sin = np.cos(np.outer(np.arange(n), inv_freq)), np.sin(np.outer(np.arange(n), inv_freq))
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], 1)


def wpq(tensors, params, layer, head, keys, queries, inv_freq):
    """Codes [stages, n, m] and scores [r, n] of rotated keys [n, d] at positions from 0 on, for rotated queries [r, d]."""
    path = mean_path(tensors, layer, head, len(keys), inv_freq)
    chol, rotation, mean, words = (
        tensors[f"wpq.{name}"][layer, head].astype(np.float64) for name in ("chol", "rotation", "mean", "codebook"))
    left = deal((keys - path - mean) @ chol @ rotation, params["groups"], words.shape[-1])
    query_map = np.linalg.solve(chol.T, rotation).astype(np.float16).astype(np.float64)
    y = deal(queries @ query_map, params["groups"], words.shape[-1])
    codes, score = [], queries @ (mean + path).T
    groups = np.arange(params["groups"])
    for stage in words:
        code = ((left[:, :, None] - stage[None]) ** 2).sum(-1).argmin(-1)
        nearest = stage[groups, code]
        codes.append(code.tolist())
        score = score + np.einsum("rmc,nmc->rn", y, nearest)
        left = left - nearest
    return codes, score / np.sqrt(keys.shape[1])


def prior(tensors, params, layer, query_head, offsets):
    """Scalars by name, and the mean mass at some offsets: that of their bucket over its width."""
    scalars = dict(zip(params["scalars"], tensors["lfps.scalars"][layer, query_head].tolist()))
    edges = np.concatenate([np.arange(params["slash_exact"]), params["slash_edges"], [2**20]])
    bucket = np.minimum(np.searchsorted(edges, offsets, side="right"), len(edges) - 1) - 1
    mass = tensors["lfps.slash"][layer, query_head][bucket] / np.diff(edges)[bucket]
    return scalars, mass.tolist()


def double_sparsity(tensors, layer, head, keys, queries, count):
    """Scores [r, n] of rotated keys [n, d] for rotated queries [r, d], by the labels of their first channels."""
    channels = tensors["doublesparsity.channels"][layer, head][:count]
    x = keys[:, channels].astype(np.float32)
    low = x.min(1, keepdims=True)
    step = (x.max(1, keepdims=True) - low) / np.float32(15)
    code = np.floor((x - low) / np.where(step > 0, step, 1) + np.float32(0.5))
    low, step = (part.astype(np.float16).astype(np.float64) for part in (low, step))
    return queries[:, channels] @ (low + step * code).T / np.sqrt(keys.shape[1])


def triattention(tensors, layer, query_head, keys, inv_freq):
    """Scores [n] of keys before rotation [n, d] at positions from 0 on, for queries after the last of them."""
    n, half = len(keys), keys.shape[1] // 2
    k = keys[:, :half] + 1j * keys[:, half:]
    re, im = tensors["triattention.q_mean"][layer, query_head].astype(np.float64).T
    q = re + 1j * im
    distances = (n - 1 - np.arange(n))[:, None] + 2 ** np.arange(17)
    waves = np.cos(inv_freq * distances[:, :, None] + np.angle(q * k.conj())[:, None]).mean(1)
    return (np.abs(q) * np.abs(k) * waves + (tensors["triattention.q_abs"][layer, query_head] - np.abs(q)) * np.abs(k)).sum(1)


def main():
    with safe_open(sys.argv[1], framework="numpy") as file:
        text = file.metadata()["kvsmith"]
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    manifest = check(tensors, text)
    if len(sys.argv) < 3:
        model = manifest["model"]
        print(f"{model['model_type']}, {model['n_layers']} layers, sections: {', '.join(manifest['sections'])}")
        return
    given = json.load(open(sys.argv[2], encoding="utf-8"))
    layer, head = given["layer"], given["head"]
    codes = encode(tensors, layer, head, np.array(given["keys"], np.float64))
    factors = turns(manifest["sections"]["a2ats"], np.array(given["rope_inv_freq"]))
    table = scores(tensors, layer, head, np.array(given["queries"], np.float64), factors)
    scalars, slash = prior(tensors, manifest["sections"]["lfps"], layer, given["query_head"], given["offsets"])
    rotated = [np.array(given[name], np.float64) for name in ("keys_rope", "queries_rope")]
    wpq_codes, wpq_scores = wpq(tensors, manifest["sections"]["wpq"], layer, head, *rotated, np.array(given["rope_inv_freq"]))
    tail = (layer, given["query_head"])
    peers = {}
    if "triattention.q_mean" in tensors:
        series = (np.array(given["keys"], np.float64), np.array(given["rope_inv_freq"]))
        peers = {
            "doublesparsity": double_sparsity(tensors, layer, head, *rotated, 4).tolist(),
            "triattention": triattention(tensors, *tail, *series).tolist(),
        }
    print(json.dumps({
        "scalars": scalars, "slash": slash, "codes": codes.tolist(), "scores": table[:, :, codes].tolist(),
        "wpq_codes": wpq_codes, "wpq_scores": wpq_scores.tolist(),
        "tail": float(tensors["tail.shift"][tail]) if tensors["tail.used"][tail] else None, **peers,
    }))


if __name__ == "__main__":
    main()
