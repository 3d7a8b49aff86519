#!/usr/bin/env python3
"""Print the figures README.md states about the model, using transformers.

    evaluate_model.py [--model model] [--heldout heldout.txt] [--needles needles.jsonl] [--train train.txt]

Losses are mean cross-entropies in nats per token.  The weights are read as
stored (bfloat16) and the arithmetic is float32.  Every sequence starts with
<|bos|>.  In the copy tests the first token of the second occurrence is left
out, because nothing announces that the repetition begins.  A needle counts as
answered when greedy decoding from its prompt begins with the whole answer.
"""

import argparse
import collections
import json
import math
import os
import pathlib

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from make_needles import LENGTHS

HERE = pathlib.Path(__file__).resolve().parent


@torch.no_grad()
def token_losses(model, ids):
    """Loss of each token but the first, for one sequence."""
    logits = model(torch.tensor(ids)[None]).logits[0, :-1].float()
    return F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").numpy()


@torch.no_grad()
def answered(model, prompt, answer):
    """Whether greedy decoding goes on with the answer: each of its tokens ranks first after those before it."""
    logits = model(torch.tensor(prompt + answer)[None]).logits[0, len(prompt) - 1:-1]
    return logits.argmax(-1).tolist() == answer


def entropy(counts):
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, default=HERE / "model")
    parser.add_argument("--heldout", type=pathlib.Path, default=HERE / "heldout.txt")
    parser.add_argument("--needles", type=pathlib.Path, default=HERE / "needles.jsonl")
    parser.add_argument("--train", type=pathlib.Path, help="training text, to report verbatim overlap")
    parser.add_argument("--samples", type=int, default=16, help="sequences per copy test")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.model_max_length = int(1e9)  # the whole text is encoded at once, then cut
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    context = model.config.max_position_embeddings
    text = args.heldout.read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    bos = tokenizer.bos_token_id
    assert tokenizer(text[:100]).input_ids[0] == bos
    assert tokenizer.decode(ids) == text

    print(f"held-out text: {len(text.encode())} bytes, {len(ids)} tokens")
    print(f"  unigram entropy of these tokens      {entropy(collections.Counter(ids)):.3f} nats/token")
    for length in (256, 1024, context):
        losses = np.concatenate([token_losses(model, [bos] + ids[i:i + length - 1])
                                 for i in range(0, len(ids), length - 1)])
        assert len(losses) == len(ids)
        bits = losses.sum() / math.log(2) / len(text.encode())
        print(f"  loss, windows of {length:<4}                 {losses.mean():.3f} nats/token, "
              f"{bits:.3f} bits/byte")
    if args.train:
        seen = args.train.read_text(encoding="utf-8")
        words, whole = text.split(), " ".join(seen.split())
        spans = [" ".join(words[i:i + 12]) for i in range(0, len(words) - 12, 12)]
        share = sum(span in whole for span in spans) / len(spans)
        print(f"  12-word spans that also occur verbatim in the training text: {100 * share:.1f} %")

    found = collections.defaultdict(list)
    for line in args.needles.read_text(encoding="utf-8").splitlines():
        needle = json.loads(line)
        prompt = tokenizer(needle["prompt"]).input_ids
        answer = tokenizer(needle["answer"], add_special_tokens=False).input_ids
        assert len(prompt) == needle["tokens"]
        length = next(n for n in LENGTHS if len(prompt) <= n)
        found[needle["kind"], length].append(answered(model, prompt, answer))
    lengths = sorted({length for _, length in found})
    print(f"needles answered (prompts of {', '.join(str(n) for n in lengths)} tokens, or a few less):")
    for kind in dict.fromkeys(kind for kind, _ in found):
        cells = [found[kind, length] for length in lengths]
        print(f"  {kind:<12}" + "".join(f" {sum(c):>4} of {len(c)} ({100 * sum(c) / len(c):5.1f} %)" for c in cells))
    for length in lengths:
        cell = sum((found[kind, n] for kind, n in found if n == length), [])
        print(f"  all of {length:<5} {sum(cell):>4} of {len(cell)} ({100 * sum(cell) / len(cell):5.1f} %)")

    rng = np.random.default_rng(20240)
    vocab = len(tokenizer)
    draw = lambda n: rng.integers(2, vocab, n).tolist()

    def report(name, make):
        """`make` returns the sequence and the span (from, to) of the second occurrence."""
        losses, right = [], []
        for _ in range(args.samples):
            sequence, start, end = make()
            with torch.no_grad():
                logits = model(torch.tensor(sequence)[None]).logits[0]
            logits = logits[start:end - 1].float()
            target = torch.tensor(sequence[start + 1:end])
            losses.append(F.cross_entropy(logits, target, reduction="none"))
            right.append((logits.argmax(-1) == target).float())
        print(f"  {name:<52} {torch.cat(losses).mean():.3f} nats/token, "
              f"{100 * torch.cat(right).mean():.1f} % of tokens ranked first")

    print(f"copying of random segments (a uniform guess costs {math.log(vocab - 2):.3f}):")

    def twice(n):
        segment = draw(n)
        return [bos] + segment + segment, 1 + n, 1 + 2 * n

    for n in (64, 128, 200, (context - 1) // 2):
        report(f"{n} tokens, repeated at once", lambda: twice(n))

    def far(n, filler, distance=None):
        """The second occurrence ends the context; `distance` counts from start to start."""
        segment, rest = draw(n), context - 1 - 2 * n
        fill = filler(rest)
        before = rest // 8 if distance is None else rest - (distance - n)
        sequence = [bos] + fill[:before] + segment + fill[before:] + segment
        return sequence, context - n, context

    def window(n):
        at = int(rng.integers(0, len(ids) - n))
        return ids[at:at + n]

    for n in (64, 128, 200):
        report(f"{n} tokens, end of {context}, held-out text between", lambda: far(n, window))
    for n in (64, 128, 200):
        report(f"{n} tokens, end of {context}, random tokens between", lambda: far(n, draw))
    for distance in (256, 512, 1024, 1536):
        report(f"128 tokens, end of {context}, distance {distance}, text between",
               lambda: far(128, window, distance))


if __name__ == "__main__":
    main()
