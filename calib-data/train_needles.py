#!/usr/bin/env python3
"""Second stage: teach the model of train_model.py to answer needles.

    train_needles.py --text train.txt --model model --run run2 [--device cuda]

Starts from the exported weights in --model.  The run folder receives log.txt,
state.pt (to resume: start the same command again) and export/.

A needle is a sentence with a key and a value, `The word of Abner is mercy
stone.`; it is asked for by its beginning, `The word of Abner is`.  A needle
sequence is text with several needles at random places, nearly always of one
template, so that only the key tells them apart; some are asked for again
further on, and most of them in a row at the end.  Values that are asked for
weigh more in the loss than text; first occurrences are left out of it.  In
some sequences the sentences are made of random tokens.  The other sequences
are those of train_model.py, so that text and copying are kept.

Short sequences leave gaps in their positions, so that far distances are
trained at the price of short contexts.  The context grows (STAGES) when the
needles of make_needles.py are answered, or at the latest when the stage's
share of the run is over.
"""

import argparse
import math
import os
import pathlib
import signal
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer

from make_needles import TEMPLATES, Prompts, Words
from train_model import CONFIG, IGNORE, Data, Llama, export

HERE = pathlib.Path(__file__).resolve().parent
CONTEXT = CONFIG["max_position_embeddings"]

# Share of the run after which the stage ends at the latest; context; tokens
# per step; shares of needle, text, random and mixed sequences.
STAGES = [
    (0.20, 256, 4096, (0.80, 0.10, 0.05, 0.05)),
    (0.40, 512, 4096, (0.70, 0.18, 0.04, 0.08)),
    (0.60, 1024, 8192, (0.65, 0.23, 0.04, 0.08)),
    (1.00, 2048, 8192, (0.55, 0.30, 0.05, 0.10)),
]
ENOUGH = 0.9  # accuracy at which the context grows
WEIGHT = 6.0  # of a token of an answer; a token of text has 1


class Needles(Data):
    def __init__(self, text_path, tokenizer_path):
        super().__init__(text_path, tokenizer_path)
        tokenizer = Tokenizer.from_file(str(tokenizer_path / "tokenizer.json"))
        encode = lambda s: tokenizer.encode(s, add_special_tokens=False).ids
        self.words = Words(text_path.read_text(encoding="utf-8"), tokenizer, False)
        self.templates = []
        for template in TEMPLATES:
            before, rest = (" " + template).split(" {k}")
            self.templates.append((encode(before), encode(rest.split("{v}")[0]), encode(".")))
        self.stops = np.flatnonzero(np.isin(self.stream, [encode(s)[0] for s in ".?"]))

    def host(self, rng, n):
        """n tokens of text that begin with a sentence, and the ends of the sentences in them."""
        while True:
            start = int(self.stops[int(rng.integers(len(self.stops)))]) + 1
            if start + n < len(self.stream):
                break
        a, b = np.searchsorted(self.stops, [start, start + n])
        return self.stream[start:start + n], np.append(self.stops[a:b] - start + 1, n)

    def group(self, rng, n):
        """n needles (question, value, end) that only their keys tell apart."""
        def draw(low, high):
            return self.random_tokens(rng, int(rng.integers(low, high + 1))).tolist()

        if rng.random() < 0.15:  # random tokens
            before, after, end = draw(1, 5), draw(0, 3), draw(1, 1)
            return [(before + draw(1, 3) + after, draw(2, 4), end) for _ in range(n)]
        before, after, end = self.templates[int(rng.integers(len(self.templates)))]
        needles = []
        for key, value in self.words.pairs(rng, n):
            value = self.words.encode(" " + value) if rng.random() < 0.9 else draw(2, 4)
            needles.append((before + self.words.encode(" " + key) + after, value, end))
        return needles

    def needles(self, rng, t):
        """Text with needles; ids, labels and weights."""
        most = max(4, t // 32) if t <= 512 else 16 + (t - 512) // 128
        n = 1 if rng.random() < 0.08 else int(rng.integers(2, most + 1))
        n = min(n, (t - 32) // 26)
        needles = self.group(rng, n)
        if n > 3 and rng.random() < 0.15:
            needles[:n // 2] = self.group(rng, n // 2)
        events = []  # place, needle, asked
        again = rng.random() * 0.5
        for needle in needles:
            at = rng.random()
            events.append((at, needle, False))
            if rng.random() < again:
                events.append((at + (1 - at) * rng.random(), needle, True))
        events.sort(key=lambda event: event[0])
        last = rng.permutation(n)[:max(1, round(n * (1 - 0.6 * rng.random())))]
        room = t - 1 - sum(len(sum(needle, [])) for _, needle, _ in events)
        final = []
        for i in last:
            size = len(sum(needles[i], []))
            if room - size < t // 8:
                break
            room -= size
            final.append((1.0, needles[i], True))
        if rng.random() < 0.3:  # text after the questions too
            final = [(0.97, needle, True) for _, needle, _ in final]
        events = [e for e in events if not (final and e[0] >= 0.97 and e[2])] + final
        # The one rule: what is asked for has been said before.
        said, ordered = set(), []
        for at, needle, asked in events:
            if asked and id(needle) not in said:
                continue
            said.add(id(needle))
            ordered.append((at, needle, asked))
        room = t - 1 - sum(len(sum(needle, [])) for _, needle, _ in ordered)
        filler, stops = self.host(rng, room)
        ids, labels, weights = [[self.bos]], [[IGNORE]], [[0.0]]

        def text(part):
            ids.append(part)
            labels.append(part)
            weights.append(np.ones(len(part)))

        at = 0
        for place, (question, value, end), asked in ordered:
            cut = room if place >= 1 else int(place * room)
            if place < 1:
                cut = int(stops[min(np.searchsorted(stops, cut), len(stops) - 1)])
            cut = max(cut, at)
            text(filler[at:cut])
            at = cut
            ids.append(question + value + end)
            if asked:
                labels.append([IGNORE] * len(question) + value + end)
                weights.append([0.0] * len(question) + [WEIGHT] * len(value) + [1.0])
            else:
                labels.append([IGNORE] * (len(question) + len(value) + 1))
                weights.append([0.0] * (len(question) + len(value) + 1))
        text(filler[at:])
        return tuple(np.concatenate(part)[:t] for part in (ids, labels, weights))

    def positions(self, rng, t):
        """0, 1, 2, ... with up to three gaps."""
        positions = np.arange(t)
        if t < CONTEXT and rng.random() < 0.75:
            left = int(rng.integers(0, CONTEXT - t + 1))
            for _ in range(int(rng.integers(1, 4))):
                gap = int(rng.integers(0, left + 1))
                positions[int(rng.integers(1, t)):] += gap
                left -= gap
        return positions

    def batch(self, seed, step, count, t, mix):
        rng = np.random.default_rng([seed, step])
        rows = []
        for _ in range(count):
            kind = rng.choice(4, p=mix)
            if kind == 0:
                ids, labels, weights = self.needles(rng, t)
            else:
                ids, labels = (self.text, self.random, self.mixed)[kind - 1](rng, t)
                weights = (labels != IGNORE).astype(float)
            rows.append((ids, labels, weights, self.positions(rng, t)))
        ids, labels, weights, positions = map(np.stack, zip(*rows))
        return (torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(labels.astype(np.int64)),
                torch.from_numpy(weights).float(), torch.from_numpy(positions))


def needle_loss(model, ids, labels, weights, positions):
    """Weighted mean; and the plain means over text and over answers."""
    hidden = model(ids, positions)[:, :-1].reshape(-1, CONFIG["hidden_size"])
    target, weight = labels[:, 1:].reshape(-1), weights[:, 1:].reshape(-1)
    keep = target != IGNORE
    target, weight = target[keep], weight[keep]
    losses = F.cross_entropy(F.linear(hidden[keep], model.model.embed_tokens.weight), target, reduction="none")
    asked, each = weight > 1, losses.detach()
    parts = (each[~asked].sum().item(), (~asked).sum().item(), each[asked].sum().item(), asked.sum().item())
    return (losses * weight).sum() / weight.sum(), parts


class Check:
    """Fixed held-out needles: accuracy (whole answers, greedy) for one and for several needles."""

    def __init__(self, tokenizer, host, text, device, count):
        prompts = Prompts(tokenizer, host, text)
        self.device, self.sets = device, {}
        for tokens in (256, 512, 1024, 2000):
            for kind in ("single", "all"):
                draws = [np.random.default_rng([99, tokens, i]) for i in range(count if kind == "all" else 2 * count)]
                self.sets[tokens, kind] = [prompts.ids(prompts.make(rng, kind, tokens)) for rng in draws]

    @torch.no_grad()
    def accuracy(self, model, tokens, kind):
        right = []
        for ids, spans in self.sets[tokens, kind]:
            row = torch.tensor(ids, device=self.device)
            hidden = model(row[None])[0]
            for a, b in spans:
                guess = F.linear(hidden[a - 1:b - 1], model.model.embed_tokens.weight).argmax(-1)
                right.append(bool((guess == row[a:b]).all()))
        return sum(right) / len(right)


@torch.no_grad()
def text_loss(model, data, ids, device, windows=8, n=1024):
    """Held-out text, the first windows of it."""
    losses = []
    for i in range(windows):
        row = torch.tensor([data.bos] + ids[i * (n - 1):(i + 1) * (n - 1)], device=device)[None]
        losses.append(model.loss(row, row).item())
    return sum(losses) / len(losses)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--model", type=pathlib.Path, default=HERE / "model", help="weights to start from, tokenizer")
    parser.add_argument("--heldout", type=pathlib.Path, default=HERE / "heldout.txt")
    parser.add_argument("--run", type=pathlib.Path, required=True)
    parser.add_argument("--tokens", type=float, default=9e6, help="length of the run")
    parser.add_argument("--minutes", type=float,
                        help="end by then: the schedule follows the clock where that is ahead of the tokens")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check", type=int, default=8, help="sequences per check")
    parser.add_argument("--every", type=float, default=6e5, help="tokens between checks (each also saves)")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.run.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    data = Needles(args.text, args.model)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    host = args.heldout.read_text(encoding="utf-8")
    host_ids = tokenizer.encode(host, add_special_tokens=False).ids
    check = Check(tokenizer, host, (HERE / "text.txt").read_text(encoding="utf-8"), device, args.check)
    model = Llama(CONFIG)
    stored = load_file(str(args.model / "model.safetensors"))
    model.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    model.to(device)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.lr, betas=(0.9, 0.95), eps=1e-8,
    )
    step, tokens, spent, stage = 0, 0, 0.0, 0
    state_path = args.run / "state.pt"
    if state_path.exists():
        state = torch.load(state_path, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, tokens, spent, stage = (state[k] for k in ("step", "tokens", "spent", "stage"))

    log = open(args.run / "log.txt", "a", buffering=1)

    def say(line):
        print(line, flush=True)
        log.write(line + "\n")

    def save():
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                 "step": step, "tokens": tokens, "spent": spent, "stage": stage}
        torch.save(state, args.run / "state.pt.new")
        os.replace(args.run / "state.pt.new", state_path)
        export(model, args.model, args.run / "export")

    def checked():
        """Says how the model does; the accuracy with several needles, by length."""
        found = {key: check.accuracy(model, *key) for key in check.sets}
        several = {t: a for (t, kind), a in found.items() if kind == "all"}
        say(f"check at step {step}: text {text_loss(model, data, host_ids, device):.3f}; accuracy " +
            ", ".join(f"{t}: {found[t, 'single']:.2f} {a:.2f}" for t, a in several.items()))
        return several

    say(f"starting at step {step}, stage {stage}")
    parts, shown, seconds = np.zeros(4), 0, 0.0
    checked()
    last = time.monotonic()
    stop = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.append(True))
    while not stop:
        progress = tokens / args.tokens
        if args.minutes:
            progress = max(progress, spent / (60 * args.minutes))
        if progress >= 1:
            break
        while progress >= STAGES[stage][0]:
            stage += 1
        _, context, per_step, mix = STAGES[stage]
        # Warm-up, a plateau for two fifths, and a cosine down to 2 %.
        fall = max(0.0, (progress - 0.4) / 0.6)
        rate = args.lr * min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * fall)))
        for group in optimizer.param_groups:
            group["lr"] = rate

        batch = [part.to(device) if i < 3 else part
                 for i, part in enumerate(data.batch(args.seed, step, per_step // context, context, mix))]
        loss, found = needle_loss(model, *batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        step += 1
        tokens += per_step
        parts += found
        shown += per_step
        now = time.monotonic()
        spent, seconds, last = spent + now - last, seconds + now - last, now
        if step % 50 == 0:
            say(f"step {step} tokens {tokens} progress {progress:.3f} context {context} lr {rate:.2e} "
                f"text {parts[0] / parts[1]:.3f} answers {parts[2] / max(1, parts[3]):.3f} ({parts[3]:.0f}) "
                f"minutes {spent / 60:.1f} tokens/s {shown / seconds:.0f}")
            parts, shown, seconds = np.zeros(4), 0, 0.0
        if tokens // args.every > (tokens - per_step) // args.every:
            several = checked()
            while stage + 1 < len(STAGES) and several.get(STAGES[stage][1], 0) >= ENOUGH:
                stage += 1
            save()
    save()
    checked()
    say(f"{'stopped' if stop else 'done'}: {step} steps, {tokens} tokens, {spent / 60:.1f} minutes")


if __name__ == "__main__":
    main()
