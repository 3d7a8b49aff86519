#!/usr/bin/env python3
"""Train the small Llama model on one CPU core.

    train_model.py --text train.txt --tokenizer model --run run

`train.txt` comes from `make_text.py --full train.txt`, the tokenizer from
`train_tokenizer.py`.  The run folder receives log.txt, state.pt (to resume:
start the same command again) and export/, a Hugging Face checkpoint in
bfloat16 that is renewed every few minutes and at the end.

The model is a plain Llama decoder with the parameter names Hugging Face uses.
Each batch mixes three sorts of sequence, all starting with <|bos|>:

  text    a window of the text, or chapters joined by <|eos|>
  random  segments of random tokens, each repeated at some distance
  mixed   text with a passage (random tokens, or text) that comes back later

so that the model learns the language and also to copy what it has seen.
Random tokens that nothing could predict are left out of the loss.  The
context ends at 2048 (see STAGES).
"""

import argparse
import json
import math
import os
import pathlib
import shutil
import signal
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}

# Share of the run after which a stage ends; context; tokens per step; shares
# of text, random and mixed sequences.  Heads that copy form far sooner on
# short sequences, hence the stage of context 64.
STAGES = [
    (0.16, 256, 4096, (0.50, 0.38, 0.12)),
    (0.28, 256, 4096, (0.22, 0.66, 0.12)),
    (0.34, 64, 4096, (0.10, 0.85, 0.05)),
    (0.49, 256, 4096, (0.70, 0.15, 0.15)),
    (0.59, 512, 4096, (0.65, 0.15, 0.20)),
    (0.71, 1024, 8192, (0.65, 0.15, 0.20)),
    (1.00, 2048, 8192, (0.65, 0.15, 0.20)),
]
IGNORE = -100


# ---------------------------------------------------------------- the model


class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv, self.dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        hidden = c["hidden_size"]
        self.q_proj = nn.Linear(hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv, self.dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = self.heads // self.kv
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        hidden, inner = c["hidden_size"], c["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = Attention(c)
        self.post_attention_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.mlp = Mlp(c)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = Norm(c["hidden_size"], c["rms_norm_eps"])


class Llama(nn.Module):
    """Tied embeddings; state_dict() has the names of LlamaForCausalLM."""

    def __init__(self, c):
        super().__init__()
        self.model = Decoder(c)
        half = c["head_dim"] // 2
        inverse = c["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(c["max_position_embeddings"], dtype=torch.float64)[:, None] * inverse
        self.cos, self.sin = angle.cos().float(), angle.sin().float()
        std = c["initializer_range"]
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=std / math.sqrt(2 * c["num_hidden_layers"]) if last else std)

    def forward(self, ids, positions=None):
        """The normalised last hidden state, one row per position (0, 1, 2, ... where not given)."""
        if positions is None:
            positions = torch.arange(ids.shape[1])[None]
        cos, sin = (table[positions][:, None].to(ids.device) for table in (self.cos, self.sin))
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)

    def loss(self, ids, labels):
        """Mean cross-entropy over the labels that are not IGNORE."""
        hidden = self(ids)[:, :-1].reshape(-1, CONFIG["hidden_size"])
        target = labels[:, 1:].reshape(-1)
        keep = target != IGNORE
        return F.cross_entropy(F.linear(hidden[keep], self.model.embed_tokens.weight), target[keep])


# ----------------------------------------------------------------- the data


class Data:
    def __init__(self, text_path, tokenizer_path):
        tokenizer = Tokenizer.from_file(str(tokenizer_path / "tokenizer.json"))
        text = text_path.read_text(encoding="utf-8")
        encode = lambda s: np.array(tokenizer.encode(s, add_special_tokens=False).ids, dtype=np.int64)
        self.stream = encode(text)
        self.chapters = [encode(s) for s in text.strip().split("\n\n")]
        self.bos, self.eos = tokenizer.token_to_id("<|bos|>"), tokenizer.token_to_id("<|eos|>")
        self.first, self.vocab = 2, tokenizer.get_vocab_size()

    def window(self, rng, n):
        start = int(rng.integers(0, len(self.stream) - n))
        return self.stream[start:start + n]

    def random_tokens(self, rng, n):
        """Uniform over the vocabulary, or drawn as often as in the text, or few distinct ones."""
        kind = rng.random()
        if kind < 0.6:
            return rng.integers(self.first, self.vocab, n)
        if kind < 0.9:
            return self.stream[rng.integers(0, len(self.stream), n)]
        return rng.integers(self.first, self.vocab, 64)[rng.integers(0, 64, n)]

    @staticmethod
    def length(rng, limit):
        """A length from 16 (8 if limit is small) to limit (200 at most), short ones more often."""
        limit = min(200, limit)
        least = min(16, limit // 3)
        return int(least * (limit / least) ** rng.random())

    def text(self, rng, t):
        if rng.random() < 0.7:
            ids = self.window(rng, t - 1)
        else:
            parts, size = [], 0
            while size < t:
                chapter = self.chapters[int(rng.integers(len(self.chapters)))]
                parts += [chapter, [self.eos]]
                size += len(chapter) + 1
            ids = np.concatenate(parts)[:t - 1]
        ids = np.concatenate([[self.bos], ids])
        return ids, ids.copy()

    def random(self, rng, t):
        parts, labels, size, pool = [[self.bos]], [[IGNORE]], 1, []
        while size < t:
            if not pool or rng.random() < (0.2 if t < 128 else 0.4):
                segment = self.random_tokens(rng, self.length(rng, t // 2 - 8))
                pool.append(segment)
                label = np.full(len(segment), IGNORE)
            else:
                segment = pool[int(rng.integers(len(pool)))]
                if rng.random() < 0.3 and len(segment) > 24:
                    segment = segment[int(rng.integers(0, len(segment) - 16)):]
                label = segment.copy()
                label[0] = IGNORE
            parts.append(segment)
            labels.append(label)
            size += len(segment)
        return np.concatenate(parts)[:t], np.concatenate(labels)[:t]

    def mixed(self, rng, t):
        """Text in which one to four passages each come back once or more, anywhere later."""
        pieces = []
        budget = t - 1
        for _ in range(int(rng.integers(1, 2 + min(3, t // 512)))):
            n = self.length(rng, t // 3)
            copies = 2 if rng.random() < 0.7 else 3
            if n * copies > budget:
                continue
            budget -= n * copies
            is_random = rng.random() < 0.65
            segment = self.random_tokens(rng, n) if is_random else self.window(rng, n)
            for place in range(copies):
                pieces.append((len(pieces), segment, is_random, place > 0))
        # Keep each passage's first occurrence unlabelled where it is random.
        order = rng.permutation(len(pieces))
        seen, sequence = set(), []
        for i in order:
            _, segment, is_random, _ = pieces[i]
            again = id(segment) in seen
            seen.add(id(segment))
            label = segment.copy()
            if is_random:
                label[:1 if again else None] = IGNORE
            sequence.append((segment, label))
        # Text between the pieces: the free tokens cut at random places.
        cuts = np.sort(rng.integers(0, budget + 1, len(sequence)))
        filler = self.window(rng, budget)
        parts, labels, at = [[self.bos]], [[self.bos]], 0
        for cut, (segment, label) in zip(cuts, sequence):
            parts += [filler[at:cut], segment]
            labels += [filler[at:cut], label]
            at = cut
        parts.append(filler[at:])
        labels.append(filler[at:])
        return np.concatenate(parts), np.concatenate(labels)

    def batch(self, seed, step, count, t, mix):
        rng = np.random.default_rng([seed, step])
        rows = []
        for _ in range(count):
            kind = rng.choice(3, p=mix)
            rows.append((self.text, self.random, self.mixed)[kind](rng, t))
        ids, labels = zip(*rows)
        return torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(labels))


# ----------------------------------------------------------------- the run


def export(model, tokenizer_path, out):
    """Write a Hugging Face folder (bfloat16)."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().to(torch.bfloat16).contiguous() for name, p in model.state_dict().items()}
    save_file(tensors, str(out / "model.safetensors.new"), metadata={"format": "pt"})
    (out / "model.safetensors.new").chmod(0o644)
    os.replace(out / "model.safetensors.new", out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": 1}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tokenizer_path / name).resolve() != (out / name).resolve():
            shutil.copyfile(tokenizer_path / name, out / name)


@torch.no_grad()
def quick_copy_loss(model, data, t):
    """Second occurrence of a random segment that fills half the context."""
    rng = np.random.default_rng(1)
    n = t // 2
    rows = [np.concatenate([[data.bos], s, s])[:t] for s in
            (rng.integers(data.first, data.vocab, n) for _ in range(4))]
    ids = torch.from_numpy(np.stack(rows))
    labels = ids.clone()
    labels[:, :n + 2] = IGNORE
    return model.loss(ids, labels).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True)
    parser.add_argument("--run", type=pathlib.Path, required=True)
    parser.add_argument("--tokens", type=float, default=12e6, help="length of the run")
    parser.add_argument("--minutes", type=float,
                        help="end by then: the schedule follows the clock where that is ahead of the tokens")
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save-every", type=float, default=300, help="seconds")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.run.mkdir(parents=True, exist_ok=True)
    data = Data(args.text, args.tokenizer)
    model = Llama(CONFIG)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.lr, betas=(0.9, 0.95), eps=1e-8,
    )
    step, tokens, spent = 0, 0, 0.0
    state_path = args.run / "state.pt"
    if state_path.exists():
        state = torch.load(state_path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, tokens, spent = state["step"], state["tokens"], state["spent"]

    log = open(args.run / "log.txt", "a", buffering=1)

    def say(line):
        print(line, flush=True)
        log.write(line + "\n")

    def save():
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                 "step": step, "tokens": tokens, "spent": spent}
        torch.save(state, args.run / "state.pt.new")
        os.replace(args.run / "state.pt.new", state_path)
        export(model, args.tokenizer, args.run / "export")

    say(f"{sum(p.numel() for p in model.parameters())} parameters, {len(data.stream)} text tokens, "
        f"starting at step {step}")
    last, last_save, mean, mean_n = time.monotonic(), time.monotonic(), 0.0, 0
    window_tokens, window_time = 0, 0.0
    stop = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.append(True))
    while not stop:
        progress = tokens / args.tokens
        if args.minutes:
            progress = max(progress, spent / (60 * args.minutes))
        if progress >= 1:
            break
        _, context, per_step, mix = next(s for s in STAGES if progress < s[0])
        warm = min(1.0, (step + 1) / 100)
        rate = args.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate

        ids, labels = data.batch(args.seed, step, per_step // context, context, mix)
        loss = model.loss(ids, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        step += 1
        tokens += per_step
        mean, mean_n = mean + loss.item(), mean_n + 1
        now = time.monotonic()
        spent += now - last
        window_tokens, window_time, last = window_tokens + per_step, window_time + now - last, now
        if step % 50 == 0:
            say(f"step {step} tokens {tokens} progress {progress:.3f} context {context} lr {rate:.2e} "
                f"loss {mean / mean_n:.3f} copy {quick_copy_loss(model, data, context):.3f} "
                f"minutes {spent / 60:.1f} tokens/s {window_tokens / window_time:.0f}")
            mean, mean_n, window_tokens, window_time = 0.0, 0, 0, 0.0
        if now - last_save > args.save_every:
            save()
            last_save = time.monotonic()
    save()
    say(f"{'stopped' if stop else 'done'}: {step} steps, {tokens} tokens, {spent / 60:.1f} minutes")


if __name__ == "__main__":
    main()
