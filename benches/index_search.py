"""Compares indexes of keys at equal bytes read, outside kvsmith: the parts of `wpq`, and the alternatives that were tried.

    python benches/index_search.py KVSMITH REAL [--layers 9,21]

REAL is the folder that `make real` made. The indexes are fitted to the mixture of scripts/lab.py and measured on development text,
two blocks of each work. The script writes docs/results/index-search.json. Every index chooses the positions that 12 late queries of each block attend, besides 4 sinks and a window of 64. The error is
that of the attention output, without the layer's output projection: |o - o_full|^2 / |o_full|^2 over the query heads of a
layer, averaged over steps, heads and layers. Needs numpy and faiss-cpu.
"""

import argparse
import json
import sys
from pathlib import Path

import faiss
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import documents  # noqa: E402
from lab import MIXED, WORKS, Lab  # noqa: E402

TOKENS, CONTEXT, BLOCKS = 40_960, 8192, 2
SINKS, WINDOW, STEPS, ITERATIONS = 4, 64, 12, 15
SHARES = (0.05, 0.1)
# The WRoPE position, to which `sum_qq` of the moments belongs.
POSITION = 2048
FRACTIONS = np.array([0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2])
PATH = "half of the directions, two stages, around the path"
# Budgets that differ per head: all positions above a threshold of the estimated probability, and top-p.
THRESHOLDS = 2.0 ** -np.arange(2, 16, 0.5)
MASSES = 1 - 2.0 ** -np.arange(1, 12, 0.5)
TYPES = {"F32": np.float32, "F64": np.float64, "U8": np.uint8, "U32": np.uint32, "U64": np.uint64}


def tensors(path):
    """Reads a safetensors file; bf16 becomes f32."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    out = {}
    for name, tensor in json.loads(raw[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        start, end = (8 + size + x for x in tensor["data_offsets"])
        if tensor["dtype"] == "BF16":
            wide = np.frombuffer(raw[start:end], np.uint16).astype(np.uint32) << 16
            values = wide.view(np.float32)
        else:
            values = np.frombuffer(raw[start:end], TYPES[tensor["dtype"]])
        out[name] = values.reshape(tensor["shape"])
    return out


def rotate(x, positions, theta):
    """Applies RoPE in halves to rows [..., n, d]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def kmeans(x, words, weights=None):
    model = faiss.Kmeans(x.shape[1], words, niter=ITERATIONS, seed=1, min_points_per_centroid=1)
    model.train(np.ascontiguousarray(x), weights=weights)
    return model.centroids


def nearest(x, words):
    index = faiss.IndexFlatL2(words.shape[1])
    index.add(np.ascontiguousarray(words))
    return index.search(np.ascontiguousarray(x), 1)[1][:, 0]


class Space:
    """Coordinates z = (k - mean) L V of keys. Products with y = q L^-T V are scores in them. V has `directions` columns, or d."""

    def __init__(self, keys, moment, metric=True, principal=True, directions=None):
        d = keys.shape[1]
        self.mean = keys.mean(0)
        factor = np.eye(d)
        if metric:
            factor = np.linalg.cholesky(moment + 1e-6 * np.trace(moment) / d * np.eye(d))
        z = (keys - self.mean).astype(np.float64) @ factor
        if principal:
            axes = np.linalg.eigh(z.T @ z)[1][:, ::-1]
        else:
            axes = np.linalg.qr(np.random.default_rng(1).normal(size=(d, d)))[0]
        axes = axes[:, :directions]
        self.variances = ((z @ axes) ** 2).mean(0)
        self.keys = (factor @ axes).astype(np.float32)
        self.queries = (np.linalg.inv(factor).T @ axes / np.sqrt(d)).astype(np.float32)

    def z(self, keys):
        return (keys - self.mean) @ self.keys


def in_turn(variances, m):
    """Deals channels to m groups in turn, the largest variance first."""
    return [np.arange(j, len(variances), m) for j in range(m)]


def with_equal_bits(variances, m, bits):
    """Deals channels to m groups of one size, the next always to the group that needs the fewest bits so far.

    A channel needs log2(variance / level) / 2 bits, at least 0; the level is such that all channels need `bits`.
    """
    low, high = 1e-12 * variances.max(), variances.max()
    for _ in range(100):
        level = np.sqrt(low * high)
        needed = np.maximum(np.log2(np.maximum(variances, low) / level) / 2, 0)
        low, high = (level, high) if needed.sum() > bits else (low, level)
    groups, load = [[] for _ in range(m)], np.zeros(m)
    for i, need in enumerate(needed):
        open_groups = [j for j in range(m) if len(groups[j]) < len(variances) / m]
        j = min(open_groups, key=lambda j: load[j])
        groups[j].append(i)
        load[j] += need
    return [np.array(group) for group in groups]


class Quantiser:
    """Words of m groups in one or two stages; the second stage encodes the residual of the first.

    `jointly`: a key gets the pair of words of both stages whose sum is nearest, and the words are the means for these pairs.
    """

    def __init__(self, space, keys, m, words, stages=1, weights=None, deal=in_turn, jointly=False):
        self.space, self.m, self.stages, self.jointly = space, m, [], False
        self.groups = deal(space.variances, m)
        left = space.z(keys)
        for _ in range(stages):
            stage = [kmeans(left[:, group], words, weights) for group in self.groups]
            self.stages.append(stage)
            self.encode_stage(left, stage)
        self.bits = [m * int(np.log2(words))] * stages
        if jointly:
            self.jointly = True
            self.refit(space.z(keys))
        d, directions = space.keys.shape
        self.fixed = 2 * directions * (words * stages + d)

    def refit(self, z, passes=5):
        """Alternates between the nearest pairs of words and the words that are best for them."""
        for _ in range(passes):
            codes = self.encode_pairs(z)
            for j, group in enumerate(self.groups):
                for own, other in ((0, 1), (1, 0)):
                    words, numbers = self.stages[own][j], codes[own][j]
                    left = z[:, group] - self.stages[other][j][codes[other][j]]
                    counts = np.bincount(numbers, minlength=len(words))
                    used = counts > 0
                    for c in range(words.shape[1]):
                        sums = np.bincount(numbers, left[:, c], minlength=len(words))
                        words[used, c] = sums[used] / counts[used]

    def encode_pairs(self, z):
        codes = [[], []]
        for group, first, second in zip(self.groups, *self.stages):
            pairs = (first[:, None] + second[None]).reshape(-1, first.shape[1])
            code = nearest(z[:, group], pairs)
            codes[0].append(code // len(second))
            codes[1].append(code % len(second))
        return codes

    def encode_stage(self, left, stage):
        codes = []
        for group, words in zip(self.groups, stage):
            code = nearest(left[:, group], words)
            left[:, group] -= words[code]
            codes.append(code)
        return codes

    def encode(self, keys):
        left = self.space.z(keys)
        if self.jointly:
            return self.encode_pairs(left)
        return [self.encode_stage(left, stage) for stage in self.stages]

    def scores(self, q, codes):
        """Returns the estimated scores after each stage, [r, n] each."""
        y = q @ self.space.queries
        sums = np.repeat((q @ self.space.mean / np.sqrt(q.shape[1]))[:, None], len(codes[0][0]), 1)
        out = []
        for stage, code in zip(self.stages, codes):
            for group, words, numbers in zip(self.groups, stage, code):
                sums = sums + (y[:, group] @ words.T)[:, numbers]
            out.append(sums)
        return out


class AroundPath:
    """Codes of half of the directions around the path of the mean key: of k - R_i mean, as `wpq` has them."""

    def __init__(self, keys, positions, mean, theta, moment):
        d = keys.shape[1]
        self.mean, self.theta = mean, theta
        left = keys - self.path(positions)
        self.quantiser = Quantiser(Space(left, moment, directions=d // 2), left, 8, 16, 2)
        # The step also reads the mean and the mean before rotation.
        self.bits, self.fixed = self.quantiser.bits, self.quantiser.fixed + 8 * d

    def path(self, positions):
        return rotate(np.repeat(self.mean[None], len(positions), 0), positions, self.theta)

    def encode(self, keys, positions):
        return self.quantiser.encode(keys - self.path(positions))

    def scores(self, q, codes, path):
        exact = q @ path.T / np.sqrt(q.shape[1])
        return [scores + exact for scores in self.quantiser.scores(q, codes)]


class Signs:
    """Self-Indexing's one-pass centroids: the mean of the keys that share the signs of four channels."""

    def __init__(self, keys):
        d = keys.shape[1]
        self.bits, self.fixed = [d], 64 * d
        centered = (keys - np.median(keys, 0)).reshape(len(keys), d // 4, 4)
        self.patterns = ((centered > 0) * np.array([1, 2, 4, 8])).sum(-1)
        self.centroids = np.zeros((d // 4, 16, 4), np.float32)
        for j in range(d // 4):
            counts = np.maximum(np.bincount(self.patterns[:, j], minlength=16), 1)
            for c in range(4):
                sums = np.bincount(self.patterns[:, j], centered[:, j, c], minlength=16)
                self.centroids[j, :, c] = sums / counts

    def scores(self, q, n):
        groups = q.reshape(len(q), -1, 4)
        tables = np.einsum("rjc,jpc->rjp", groups, self.centroids) / np.sqrt(q.shape[1])
        return sum(tables[:, j, self.patterns[:n, j]] for j in range(tables.shape[1]))


def indexes(keys, moment, weights):
    """Returns the calibrated indexes of a head, by name."""
    space = Space(keys, moment)
    no_metric = Space(keys, moment, metric=False)
    no_principal = Space(keys, moment, principal=False)
    half, quarter = (Space(keys, moment, directions=keys.shape[1] // part) for part in (2, 4))
    out = {
        "256 words, 8 groups": Quantiser(space, keys, 8, 256),
        "256 words, 4 groups": Quantiser(space, keys, 4, 256),
        "16 words, 16 groups": Quantiser(space, keys, 16, 16),
        "16 words, 8 groups": Quantiser(space, keys, 8, 16),
        "16 words, 8 groups, two stages": Quantiser(space, keys, 8, 16, 2),
        "half of the directions, two stages": Quantiser(half, keys, 8, 16, 2),
        "half, dealt to equal bits": Quantiser(half, keys, 8, 16, 2, deal=lambda variances, m: with_equal_bits(variances, m, 64)),
        "half, encoded by pairs of words": Quantiser(half, keys, 8, 16, 2, jointly=True),
        "a quarter of the directions, two stages": Quantiser(quarter, keys, 8, 16, 2),
        "two stages without the metric": Quantiser(no_metric, keys, 8, 16, 2),
        "two stages, random rotation": Quantiser(no_principal, keys, 8, 16, 2),
        "256 words of all channels, two stages": Quantiser(space, keys, 1, 256, 2),
    }
    if weights is not None:
        out["16 words, 8 groups, two stages, weighted"] = Quantiser(space, keys, 8, 16, 2, weights)
    return out


def windowed_indexes(keys, moment):
    """Returns indexes of unrotated keys, which score with the query rotated to the WRoPE position, as A2ATS does."""
    space = Space(keys, moment)
    return {
        "WRoPE, 1,024 words": Quantiser(space, keys, 1, 1024),
        "WRoPE, 256 words, two stages": Quantiser(space, keys, 1, 256, 2),
    }


class Step:
    """One step of one query group: its exact attention, and the loss of a choice of positions."""

    def __init__(self, q, keys, values):
        n, d = keys.shape
        self.scores, self.values = q @ keys.T / np.sqrt(d), values
        self.p = softmax(self.scores)
        self.out = self.p @ values
        self.static = np.r_[0:SINKS, n - WINDOW : n]
        self.candidates = np.arange(SINKS, n - WINDOW)

    def mass(self, estimate, pooled="softmax"):
        """Returns the estimated attention of the candidates, summed over the query heads."""
        if pooled == "mean":
            return estimate[:, self.candidates].sum(0)
        mixed = estimate.copy()
        mixed[:, self.static] = self.scores[:, self.static]
        return softmax(mixed)[:, self.candidates].sum(0)

    def losses(self, order, counts):
        """Returns the squared error of the output for each count, with the first `count` positions of an order chosen."""
        p, values = self.p[:, self.static], self.values[self.static]
        mass, out, done, losses = p.sum(1), p @ values, 0, []
        for count in counts:
            chosen = self.candidates[order[done:count]]
            mass = mass + self.p[:, chosen].sum(1)
            out = out + self.p[:, chosen] @ self.values[chosen]
            done = max(done, count)
            losses.append(((out / mass[:, None] - self.out) ** 2).sum())
        return np.array(losses)

    def keys_first(self, first, second, count, more):
        """Returns the error if keys are read for (1 + more) count positions, and values for the best (1 - more) of them.

        The bytes are those of count positions with both.
        """
        keys = self.candidates[self.refined(first, second, int((1 + more) * count))[: int((1 + more) * count)]]
        known = np.concatenate([self.scores[:, self.static], self.scores[:, keys]], 1)
        mass = softmax(known)[:, len(self.static) :].sum(0)
        chosen = np.r_[self.static, keys[np.argsort(-mass, kind="stable")[: int((1 - more) * count)]]]
        p = self.p[:, chosen]
        return ((p @ self.values[chosen] / p.sum(1, keepdims=True) - self.out) ** 2).sum()

    def refined(self, first, second, count, factor=4):
        """Returns the candidates ranked by both stages; the second scores only the best of the first."""
        rough = np.argsort(-self.mass(first), kind="stable")[: factor * count]
        mixed = first.copy()
        mixed[:, self.candidates[rough]] = second[:, self.candidates[rough]]
        return rough[np.argsort(-self.mass(mixed)[rough], kind="stable")]


class Table:
    """The losses per index and layer, and what a step reads."""

    def __init__(self, n, d):
        self.rows, self.adaptive, self.scale, self.reads = {}, {}, {}, {}
        self.n, self.row = n, 4 * d

    def add(self, layer, name, losses, bits, fixed, rescored=0.0):
        self.rows.setdefault(name, {}).setdefault(layer, []).append(losses)
        self.reads[name] = (sum(bits) / 8 / self.row + fixed / self.row / self.n, rescored)

    def error(self, name, fraction):
        curve = [np.mean(x, 0) / np.mean(self.scale[layer]) for layer, x in self.rows[name].items()]
        return np.exp(np.interp(np.log(fraction), np.log(FRACTIONS), np.log(np.mean(curve, 0))))

    def fraction(self, name, share):
        index, rescored = self.reads[name]
        return (share - (SINKS + WINDOW) / self.n - index) / (1 + rescored)

    def at_adaptive(self, name, kind, fraction):
        layers = self.adaptive[name, kind]
        error = np.mean([np.mean([x for x, _ in v], 0) / np.mean(self.scale[k]) for k, v in layers.items()], 0)
        count = np.mean([np.mean([c for _, c in v], 0) for v in layers.values()], 0)
        return np.exp(np.interp(np.log(fraction), np.log(count + 1e-9), np.log(error)))

    def document(self):
        """Returns the rows: the bits read per key, and at each share the errors with one budget, one threshold and top-p, or None."""
        rows = []
        for name in self.rows:
            index, _ = self.reads[name]
            errors = []
            for share in SHARES:
                fraction = self.fraction(name, share)
                if fraction <= FRACTIONS[0]:
                    errors.append(None)
                    continue
                adaptive = [self.at_adaptive(name, kind, fraction) for kind in ("threshold", "top-p") if (name, kind) in self.adaptive]
                errors.append([self.error(name, fraction), *adaptive])
            rows.append({"index": name, "bits": index * self.row * 8, "errors": errors})
        return rows


def measure(table, layer, step, estimates, bits_and_fixed):
    """Adds the losses of every index at one step."""
    counts = (FRACTIONS * len(step.p[0])).astype(int)
    table.scale.setdefault(layer, []).append((step.out**2).sum())

    def add(name, order, bits, fixed, mass=None):
        table.add(layer, name, step.losses(order, counts), bits, fixed)
        if mass is not None:
            reached = np.cumsum(mass[order]) + len(step.p) - mass.sum()
            above = np.searchsorted(-mass[order], -THRESHOLDS, side="right")
            enough = np.minimum(np.searchsorted(reached, MASSES * len(step.p)) + 1, len(order))
            for kind, kept in (("threshold", above), ("top-p", enough)):
                found = step.losses(order, kept), kept / len(step.p[0])
                table.adaptive.setdefault((name, kind), {}).setdefault(layer, []).append(found)

    def ranked(name, key, bits, fixed, is_mass=False):
        add(name, np.argsort(-key, kind="stable"), bits, fixed, key if is_mass else None)

    mass = step.mass(step.scores)
    norms = np.linalg.norm(step.values[step.candidates], axis=1)
    ranked("exact", mass, [], 0, True)
    ranked("exact, times |v|", mass * norms, [], 0)
    for name, stages in estimates.items():
        bits, fixed = bits_and_fixed[name]
        if len(stages) == 1:
            mass = step.mass(stages[0])
            ranked(name, mass, bits, fixed, True)
            if name in ("signs", "16 words, 16 groups"):
                ranked(f"{name}, mean query", step.mass(stages[0], "mean"), bits, fixed)
            if name == "16 words, 16 groups":
                ranked(f"{name}, times |v|", mass * norms, [bits[0] + 8], fixed)
            continue
        both = step.mass(stages[1])
        ranked(f"{name}, all scored by both", both, bits, fixed, True)
        losses = [step.losses(step.refined(*stages, k), [k])[0] for k in counts]
        rescored = 4 * bits[1] / 8 / table.row
        table.add(layer, f"{name}, the best 4 B by both", np.array(losses), bits[:1], fixed, rescored)
        if name == "half of the directions, two stages":
            exact = step.losses(np.argsort(-step.mass(step.scores), kind="stable"), counts)
            table.add(layer, "half, if its ranking were exact", exact, bits[:1], fixed, rescored)
            for more in (0.25, 0.5):
                losses = [step.keys_first(*stages, k, more) for k in counts]
                table.add(layer, f"half, keys of {1 + more} B positions, values of the best {1 - more} B", np.array(losses), bits[:1], fixed, rescored)


def attention_of(keys, queries, blocks):
    """Returns the attention that each key gets from sampled queries of its block, with a mean of 1 per block."""
    out = np.zeros(keys.shape[0], np.float32)
    for start, end in blocks:
        rows = np.linspace((end - start) // 8, end - start - 1, 128).astype(int)
        for q in queries[:, start:end]:
            scores = q[rows] @ keys[start:end].T / np.sqrt(keys.shape[1])
            scores[np.arange(end - start)[None] > rows[:, None]] = -np.inf
            out[start:end] += softmax(scores).sum(0)
        out[start:end] /= out[start:end].mean()
    return out


def blocks_of(tokens):
    starts = [int(x) for x in tokens["block_start"]]
    ends = starts[1:] + [len(tokens["position"])]
    return [(a, b) for a, b in zip(starts, ends) if b > a]


def dumps(lab):
    """Returns the dump that indexes are fitted to, and that of other text, in which they are searched."""
    fitted = lab.corpus("main", MIXED, TOKENS)
    lab.calibrated(fitted)
    blocks = [block for work in WORKS for block in lab.blocks(work, CONTEXT, BLOCKS, "development")]
    other = lab.documents("search", blocks, ("--seq-len", CONTEXT, "--holdout", 0))
    return lab.dump(fitted, "queries", ("--queries",)), lab.dump(other, "values", ("--queries", "--values"))


def arguments(doc):
    """Parses the arguments that this script has in common with benches/code_store.py."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kvsmith", type=Path, help="the program")
    parser.add_argument("real", type=Path, help="the folder that `make real` made")
    parser.add_argument("--layers", default="9,21", help="layers to measure, such as 3,9,15")
    parser.add_argument("--theta", type=float, default=100000.0, help="base of the rotary frequencies")
    return parser.parse_args()


def main():
    args = arguments(__doc__)
    lab = Lab(args.kvsmith, args.real)
    args.calib, args.other = dumps(lab)
    calib, other = tensors(args.calib / "tokens.safetensors"), tensors(args.other / "tokens.safetensors")
    moments = tensors(args.calib / "moments.safetensors")
    positions, fit = calib["position"].astype(np.float32), calib["held_out"] == 0
    length = max(b - a for a, b in blocks_of(other))
    table = None
    for layer in (int(x) for x in args.layers.split(",")):
        own = tensors(args.calib / f"layer-{layer:05d}.safetensors")
        theirs = tensors(args.other / f"layer-{layer:05d}.safetensors")
        heads, _, d = own["k_pre"].shape
        group = theirs["q_pre"].shape[0] // heads
        table = table or Table(length, d)
        for head in range(heads):
            queries = slice(head * group, (head + 1) * group)
            keys = rotate(own["k_pre"][head], positions, args.theta)
            weights = None
            if "q_pre" in own:
                rotated = rotate(own["q_pre"][queries], positions, args.theta)
                weights = attention_of(keys, rotated, blocks_of(calib))[fit]
            moment = moments["sum_qq_rope"][layer, head] / moments["count"][layer, head]
            calibrated = indexes(keys[fit], moment, weights)
            around = AroundPath(keys[fit], positions[fit], own["k_pre"][head][fit].mean(0), args.theta, moment)
            windowed = windowed_indexes(own["k_pre"][head][fit], moments["sum_qq"][layer, head] / moments["count"][layer, head])
            for start, end in blocks_of(other):
                if end - start < length:
                    continue
                at = other["position"][start:end].astype(np.float32)
                k = rotate(theirs["k_pre"][head, start:end], at, args.theta)
                q = rotate(theirs["q_pre"][queries, start:end], at, args.theta)
                at_window = rotate(theirs["q_pre"][queries, start:end], np.full(end - start, POSITION, np.float32), args.theta)
                signs = Signs(k)
                codes = {name: index.encode(k) for name, index in calibrated.items()}
                codes |= {name: index.encode(theirs["k_pre"][head, start:end]) for name, index in windowed.items()}
                known = {name: (index.bits, index.fixed) for name, index in (calibrated | windowed).items()}
                known |= {"signs": (signs.bits, signs.fixed), PATH: (around.bits, around.fixed)}
                path, of_path = around.path(at), around.encode(k, at)
                for t in np.linspace(length - 512, length - 1, STEPS).astype(int):
                    n = t + 1
                    estimates = {"signs": [signs.scores(q[:, t], n)]}
                    for name, index in (calibrated | windowed).items():
                        cut = [[code[:n] for code in stage] for stage in codes[name]]
                        estimates[name] = index.scores((at_window if name in windowed else q)[:, t], cut)
                    estimates[PATH] = around.scores(q[:, t], [[code[:n] for code in stage] for stage in of_path], path[:n])
                    measure(table, layer, Step(q[:, t], k[:n], theirs["v"][head, start:end][:n]), estimates, known)
        print(f"layer {layer} done", flush=True)
    documents.save("index-search", {"table": "index-search", "program": lab.commit(), "text": "development", "length": CONTEXT, "shares": SHARES,
                                    "calibration": lab.fits, "layers": args.layers, "rows": table.document()})


if __name__ == "__main__":
    main()
