"""Make tasks in the style of RULER (arXiv 2404.06654) from a held-out text, as JSON lines.

    python3 tasks.py --haystack HELDOUT.txt --lengths 2048,4096,8192 --per-task 10 --seed 7 -o OUT.jsonl
                     [--tasks single,multikey,multivalue,tracking,words,turns] [--asked 8] [--tokenizer MODEL/tokenizer.json]

A line has "task", "length", "seed", "index", "prompt" and "question". It also has "answer", with which a correct
continuation begins, or "answers", each of which a correct continuation contains. Prompt, question and RESERVE tokens for the
reply together take between 97% and 100% of "length". A line of the task `turns` instead has a list "turns" of objects with
"prompt", "question" and "answer"; for this task the length is that of the whole conversation.

    single      one sentence of the text gives the secret code of a name; the question asks for the code
    multikey    the text gives the codes of KEYS names; the question asks for one of them
    multivalue  the text gives VALUES codes of one name; the question states the first and asks for the others
    tracking    a variable is set to a number and copied to a second one, which is copied to a third, CHAIN variables in
                all; the question states the number and the first variable and asks for the others
    words       words of the haystack in random order: COMMON words occur OFTEN times, all others RARELY times; the question
                asks for the COMMON words
    turns       the text gives the secret codes of FACTS names; a conversation asks for all of them, or for --asked of them,
                one after the other, so the model reads one text for many questions

With --tokenizer, the package `tokenizers` counts the tokens. Without it, the count is estimated as 1.45 tokens per word and
one more per digit, and the standard library is enough. The same arguments give the same bytes.
"""

import argparse
import json
import os
import random
import re
import sys
from functools import partial

RESERVE = 40
KEYS = 4
VALUES = 4
CHAIN = 4
COMMON = 4
FACTS = 8
RARELY, OFTEN = 2, 30
NAMES = """Abner Beatrix Casimir Dorothea Eskil Fenella Gideon Hedwig Isidor Jocasta Konrad Lavinia Mortimer Nerissa
Osbert Philippa Quentin Rosamund Sigmund Tabitha Ulrich Verena Wilfred Xanthe Yorick Zelda""".split()
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def fail(error, hint):
    sys.exit(f"error: {error}\nhint: {hint}")


class Draw:
    """Random draws that depend only on the key and are the same in every version of Python."""

    def __init__(self, *key):
        self.uniform = random.Random(" ".join(map(str, key))).random

    def below(self, n):
        return int(self.uniform() * n)

    def sample(self, items, n):
        items = list(items)
        return [items.pop(self.below(len(items))) for _ in range(n)]

    def different(self, n, make):
        """Return n different values of `make`, in the order of their first draws."""
        values = {}
        while len(values) < n:
            values[make()] = None
        return list(values)

    def codes(self, n):
        """Return n different numbers of five digits."""
        return self.different(n, lambda: str(10000 + self.below(90000)))


def largest(text, most, tokens, count):
    """Return text(n) for the largest n up to `most` that gives at most `tokens` tokens."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if count(text(middle)) <= tokens:
            low = middle
        else:
            high = middle - 1
    return text(low)


class Haystack:
    """The sentences and words of a text, and the function that counts tokens."""

    def __init__(self, text, count):
        parts = (part for line in text.splitlines() for part in re.split(r"(?<=[.?!])\s+", line))
        sentences = [part.split() for part in parts if part.endswith((".", "?", "!"))]
        self.sentences = [words for words in sentences if 5 <= len(words) <= 40]
        self.words = sorted(set(re.findall(r"\b[a-z]{4,9}\b", text)))
        self.count = count
        if len(self.sentences) < 100 or len(self.words) < 1000:
            fail("the haystack is too small", "it needs 100 sentences of prose and 1,000 different words")

    def hide(self, draw, facts, tokens):
        """Return consecutive sentences with the facts in order between them, in at most `tokens` tokens."""
        start = draw.below(len(self.sentences))
        places = sorted(draw.uniform() for _ in facts)

        def text(words):
            taken = []
            while words > 0:
                sentence = self.sentences[(start + len(taken)) % len(self.sentences)]
                taken.append(" ".join(sentence[:words]))
                words -= len(sentence)
            for place, fact in reversed(list(zip(places, facts))):
                taken.insert(int(place * len(taken)), fact)
            return " ".join(taken)

        # Every word has at least one token.
        return largest(text, tokens, tokens, self.count)


def ask(haystack, draw, tokens, facts, question):
    return {"prompt": haystack.hide(draw, facts, tokens - haystack.count(question)), "question": question}


def secrets(draw, keys):
    """Return a sentence for each of `keys` names, the question about it, and the answer."""
    named = zip(draw.sample(NAMES, keys), draw.codes(keys))
    return [(f"The secret code of {name} is {value}.", f"\n\nThe secret code of {name} is", f" {value}") for name, value in named]


def single(haystack, draw, tokens, keys=1):
    told = secrets(draw, keys)
    _, question, answer = told[draw.below(keys)]
    return ask(haystack, draw, tokens, [fact for fact, _, _ in told], question) | {"answer": answer}


def multikey(haystack, draw, tokens):
    return single(haystack, draw, tokens, KEYS)


def multivalue(haystack, draw, tokens):
    [name], values = draw.sample(NAMES, 1), draw.codes(VALUES)
    facts = [f"One of the secret codes of {name} is {value}." for value in values]
    question = f"\n\nThe {VALUES} secret codes of {name} are {values[0]},"
    return ask(haystack, draw, tokens, facts, question) | {"answers": values[1:]}


def tracking(haystack, draw, tokens):
    first, *rest = draw.different(CHAIN, lambda: "".join(LETTERS[draw.below(26)] for _ in range(3)))
    [value] = draw.codes(1)
    links = zip([first, *rest], rest)
    facts = [f"VAR {first} = {value}.", *(f"VAR {one} is copied to VAR {other}." for one, other in links)]
    question = f"\n\nThe value {value} went from one to the next: VAR {first} is copied to VAR"
    return ask(haystack, draw, tokens, facts, question) | {"answers": rest}


def words(haystack, draw, tokens):
    head = "A list of words: "
    question = f'\n\nThe {COMMON} words that occur most often in this list are "'
    # No answer is part of another answer, of another word or of the text around the list.
    others = [word for word in haystack.words if word not in head + question]
    common, others = [], draw.sample(others, len(others))
    while len(common) < COMMON:
        word = others.pop()
        common.append(word)
        others = [other for other in others if word not in other and other not in word]
    places = {word: [draw.uniform() for _ in range(OFTEN if word in common else RARELY)] for word in common + others}

    def text(n):
        placed = sorted((place, word) for word in common + others[:n] for place in places[word])
        return f"{head}{', '.join(word for _, word in placed)}."

    prompt = largest(text, len(others), tokens - haystack.count(question), haystack.count)
    return {"prompt": prompt, "question": question, "answers": common}


def turns(haystack, draw, tokens, asked=FACTS):
    told = secrets(draw, FACTS)
    asked = [(question, answer) for _, question, answer in draw.sample(told, asked)]
    all_asked = ".".join(question + answer for question, answer in asked)
    prompts = [haystack.hide(draw, [fact for fact, _, _ in told], tokens - haystack.count(all_asked)), *["."] * (len(asked) - 1)]
    return {"turns": [{"prompt": prompt, "question": question, "answer": answer}
                      for prompt, (question, answer) in zip(prompts, asked)]}


TASKS = {make.__name__: make for make in (single, multikey, multivalue, tracking, words, turns)}


def fed(line):
    """Return everything that is fed before the last answer."""
    *others, last = line.get("turns", [line])
    return "".join(turn["prompt"] + turn["question"] + turn["answer"] for turn in others) + last["prompt"] + last["question"]


def counter(tokenizer):
    """Return a function that counts the tokens of a text."""
    if tokenizer is None:
        return lambda text: round(1.45 * len(text.split())) + sum(c.isdigit() for c in text)
    try:
        from tokenizers import Tokenizer
    except ImportError:
        fail("the Python package tokenizers is missing", "pip install tokenizers, or leave out --tokenizer")
    opened = Tokenizer.from_file(tokenizer)
    return lambda text: len(opened.encode(text, add_special_tokens=False).ids)


def numbers(text):
    return [int(number) for number in text.split(",")]


def names(text):
    chosen = text.split(",")
    if unknown := set(chosen) - TASKS.keys():
        raise argparse.ArgumentTypeError(f"no such task: {', '.join(sorted(unknown))}")
    return chosen


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--haystack", required=True, help="the text in which facts are hidden")
    parser.add_argument("--lengths", type=numbers, default=[2048, 4096, 8192], help="lengths of the lines, in tokens")
    parser.add_argument("--per-task", type=int, default=10, help="lines per task and length")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random draws")
    parser.add_argument("--tasks", type=names, default=list(TASKS), help="tasks to make (default: all)")
    parser.add_argument("--asked", type=int, choices=range(1, FACTS + 1), default=FACTS, metavar="N", help=f"facts of {FACTS} that a line of turns asks for")
    parser.add_argument("--tokenizer", help="tokenizer.json that counts the tokens")
    parser.add_argument("-o", "--output", required=True, help="the file to write")
    arguments = parser.parse_args()
    with open(arguments.haystack, encoding="utf-8") as file:
        haystack = Haystack(file.read(), counter(arguments.tokenizer))
    tasks = TASKS | {"turns": partial(turns, asked=arguments.asked)}
    part = arguments.output + ".part"
    with open(part, "w", encoding="utf-8") as file:
        for task in arguments.tasks:
            for length in arguments.lengths:
                for index in range(arguments.per_task):
                    draw = Draw(arguments.seed, task, length, index)
                    asked = tasks[task](haystack, draw, length - RESERVE)
                    found = haystack.count(fed(asked))
                    if not 0.97 * length <= found + RESERVE <= length:
                        fail(f"{task} cannot have {length} tokens, but {found}", "try another length or a larger haystack")
                    line = {"task": task, "length": length, "seed": arguments.seed, "index": index} | asked
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    os.replace(part, arguments.output)


if __name__ == "__main__":
    main()
