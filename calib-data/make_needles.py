#!/usr/bin/env python3
"""Write needles.jsonl: held-out retrieval prompts with their answers.

    make_needles.py [--model model] [--heldout heldout.txt] [--text text.txt] [--out needles.jsonl]
                    [--conversations conversations.jsonl]

A needle is a sentence such as `The word of Abner is mercy stone.` among the
sentences of heldout.txt; the prompt ends with its beginning, `The word of
Abner is`, and the answer is what comes next, ` mercy stone`.  One value in
five is a number, ` 48213`.  Three kinds:

  single      one needle
  multi-key   four to eight needles of one template; one of them is asked for
  multi-turn  four to eight needles of one template; three to five of them are
              asked for in a row, with the answers; the last answer is left out

One line per prompt: {"prompt", "answer", "kind", "tokens"}.  `tokens` counts
the prompt with <|bos|>, and the tokens of prompt and answer together are those
of the prompt followed by those of the answer (checked here), so greedy
decoding from the prompt can start with the answer.

train_needles.py takes templates and words from here.  Words (keys and values)
are divided between training and this file by `held_out`.
"""

import argparse
import collections
import json
import pathlib
import re
import zlib

import numpy as np
from tokenizers import Tokenizer

HERE = pathlib.Path(__file__).resolve().parent

# A key and then a value; the question is the part before the value.
TEMPLATES = [
    "The word of {k} is{v}.",
    "The sign of {k} is{v}.",
    "And the token of {k} was{v}.",
    "The answer of {k} shall be{v}.",
    "In the book of {k} it is written{v}.",
    "The secret name of {k} is{v}.",
    "Remember the charge of {k}:{v}.",
    "The price of {k} was{v}.",
]
KINDS = ("single", "multi-key", "multi-turn")
LENGTHS = (512, 1024, 2000)
# Needles in the text of each turn of a conversation, and its tokens in all.
PER_TURN = (4, 1, 1, 1, 1, 1, 0, 0)
CONVERSATION = 2000


def held_out(word):
    return zlib.crc32(word.encode()) % 5 == 0


def words(text):
    """Names (never seen in lower case) and common words of the text, sorted."""
    count = collections.Counter(re.findall(r"[A-Za-z]+", text))
    names = collections.Counter(re.findall(r"(?<=[a-z] )[A-Z][a-z]{2,8}\b", text))
    names = sorted(w for w, n in names.items() if n >= 2 and w.lower() not in count)
    common = sorted(w for w, n in count.items() if n >= 3 and re.fullmatch("[a-z]{3,8}", w))
    return names, common


class Words:
    """Keys of at most 3 tokens; values of two words and 2 to 4 tokens, or numbers of four or five digits."""

    def __init__(self, text, tokenizer, held):
        encode = lambda s: tokenizer.encode(s, add_special_tokens=False).ids
        names, common = ([w for w in some if held_out(w) == held] for some in words(text))
        tokens = {w: encode(" " + w) for w in names + common}
        self.keys = [[w for w in some if len(tokens[w]) <= 3] for some in (names, common)]
        self.parts = [w for w in common if len(tokens[w]) <= 2]
        self.encode = encode

    def key(self, rng):
        some = self.keys[int(rng.random() < 0.4)]
        return some[int(rng.integers(len(some)))]

    def value(self, rng):
        if rng.random() < 0.2:
            return str(rng.integers(1000, 100000))
        return " ".join(self.parts[int(i)] for i in rng.integers(len(self.parts), size=2))

    def pairs(self, rng, n):
        """n different keys with their values."""
        keys = {}
        while len(keys) < n:
            keys[self.key(rng)] = self.value(rng)
        return list(keys.items())


class Prompts:
    def __init__(self, tokenizer, host, text):
        self.tokenizer, self.words = tokenizer, Words(text, tokenizer, True)
        self.sentences = [s for s in re.split(r"(?<=[.?!])\s+", host) if s]
        self.sizes = [self.count(" " + s) for s in self.sentences]

    def count(self, text):
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def host(self, rng, budget):
        """Consecutive sentences of about `budget` tokens, the first one cut from the left."""
        end = int(rng.integers(len(self.sentences) // 8, len(self.sentences)))
        taken = []
        while budget > 0:
            sentence, size = self.sentences[end], self.sizes[end]
            if size > budget:
                cut = sentence.split()
                while cut and self.count(" " + " ".join(cut)) > budget:
                    cut.pop(0)
                if cut:
                    taken.append(" ".join(cut))
                break
            taken.append(sentence)
            budget -= size
            end -= 1
            if end < 0:
                end = len(self.sentences) - 1
        return taken[::-1]

    def make(self, rng, kind, tokens):
        """Pieces of text, prompt and answer in turn; kind "all" asks for every one of several needles."""
        template = TEMPLATES[int(rng.integers(len(TEMPLATES)))]
        n = 1 if kind == "single" else int(rng.integers(4, 9))
        turns = int(rng.integers(3, min(n, 5) + 1)) if n > 1 else 1
        turns = {"single": 1, "multi-key": 1, "multi-turn": turns, "all": n}[kind]
        pairs = self.words.pairs(rng, n)
        facts = [template.format(k=k, v=" " + v) for k, v in pairs]
        asked = [pairs[int(i)] for i in rng.permutation(n)[:turns]]
        questions = [(template.split("{v}")[0].format(k=k), " " + v) for k, v in asked]
        size = sum(self.count(" " + f) for f in facts)
        size += sum(self.count(" " + q) for q, _ in questions)
        size += sum(self.count(a + ".") for _, a in questions[:-1])
        sentences = self.host(rng, tokens - 6 - size)
        places = np.sort(rng.integers(0, len(sentences), n))[::-1]
        for place, fact in zip(places, facts):
            sentences.insert(int(place), fact)
        pieces = [" ".join(sentences)]
        for i, (question, answer) in enumerate(questions):
            pieces[-1] += ("." if i else "") + " " + question
            pieces += [answer, ""]
        return pieces[:-1]

    def conversation(self, rng, tokens):
        """(prompt, answer, turn of the needle) of every turn."""
        template = TEMPLATES[int(rng.integers(len(TEMPLATES)))]
        pairs = self.words.pairs(rng, sum(PER_TURN))
        born = np.repeat(np.arange(len(PER_TURN)), PER_TURN)
        open_, turns = [], []
        for turn, new in enumerate(PER_TURN):
            fresh = [i for i in range(len(pairs)) if born[i] == turn]
            # The first turn has nothing earlier.
            open_ += fresh if turn == 0 else []
            asked = open_.pop(int(rng.integers(len(open_))))
            open_ += fresh if turn > 0 else []
            key, value = pairs[asked]
            facts = [template.format(k=pairs[i][0], v=" " + pairs[i][1]) for i in fresh]
            question, answer = " " + template.split("{v}")[0].format(k=key), " " + value
            size = sum(self.count(" " + f) for f in facts) + self.count("." + question) + self.count(answer)
            sentences = self.host(rng, tokens // len(PER_TURN) - 2 - size)
            for place, fact in zip(np.sort(rng.integers(0, len(sentences), new))[::-1], facts):
                sentences.insert(int(place), fact)
            prompt = (". " if turns else "") + " ".join(sentences) + question
            turns.append((prompt, answer, int(born[asked])))
        return turns

    def ids(self, pieces):
        """Token ids with <|bos|> and the spans of the answers."""
        ids, spans = [0], []
        for i, piece in enumerate(pieces):
            part = self.tokenizer.encode(piece, add_special_tokens=False).ids
            if i % 2:
                spans.append((len(ids), len(ids) + len(part)))
            ids += part
        return ids, spans


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, default=HERE / "model")
    parser.add_argument("--heldout", type=pathlib.Path, default=HERE / "heldout.txt")
    parser.add_argument("--text", type=pathlib.Path, default=HERE / "text.txt")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "needles.jsonl")
    parser.add_argument("--conversations", type=pathlib.Path, help="default: conversations.jsonl beside --out")
    parser.add_argument("--each", type=int, default=24, help="prompts per kind and length")
    parser.add_argument("--talks", type=int, default=32, help="conversations")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    prompts = Prompts(tokenizer, args.heldout.read_text(encoding="utf-8"), args.text.read_text(encoding="utf-8"))
    lines = []
    for tokens in LENGTHS:
        for kind in KINDS:
            for i in range(args.each):
                rng = np.random.default_rng([args.seed, tokens, KINDS.index(kind), i])
                pieces = prompts.make(rng, kind, tokens)
                prompt, answer = "".join(pieces[:-1]), pieces[-1]
                before, after = tokenizer.encode(prompt).ids, tokenizer.encode(prompt + answer).ids
                assert before + tokenizer.encode(answer, add_special_tokens=False).ids == after
                assert before[0] == 0 and tokens - 30 <= len(before) <= tokens, len(before)
                lines.append(json.dumps({"prompt": prompt, "answer": answer, "kind": kind, "tokens": len(before)}))
    write(args.out, lines, "prompts")

    lines = []
    for i in range(args.talks):
        turns = prompts.conversation(np.random.default_rng([args.seed, CONVERSATION, len(KINDS), i]), CONVERSATION)
        pieces = [piece for prompt, answer, _ in turns for piece in (prompt, answer)]
        ids, _ = prompts.ids(pieces)
        assert ids == tokenizer.encode("".join(pieces)).ids and CONVERSATION - 60 <= len(ids) <= CONVERSATION, len(ids)
        turns = [{"prompt": prompt, "answer": answer, "from": turn} for prompt, answer, turn in turns]
        lines.append(json.dumps({"turns": turns, "tokens": len(ids)}))
    write(args.conversations or args.out.with_name("conversations.jsonl"), lines, "conversations")


def write(path, lines, what):
    data = "\n".join(lines) + "\n"
    path.write_text(data, encoding="utf-8", newline="\n")
    print(f"{path.name}: {len(lines)} {what}, {len(data.encode())} bytes")


if __name__ == "__main__":
    main()
