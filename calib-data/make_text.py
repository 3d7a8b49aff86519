#!/usr/bin/env python3
"""Write text.txt and heldout.txt from Debian's King James Bible package.

Needs the Debian packages `bible-kjv` (the reader) and `bible-kjv-text` (the
text):  apt-get install bible-kjv bible-kjv-text

Each chapter becomes one paragraph: the verse references are dropped, the
verses are joined by single spaces, and chapters are separated by an empty
line.  Chapters are numbered 0..1188 through the whole book and dealt out by
that number, so the result depends on nothing but the package:

  heldout.txt   every 50th chapter, starting at number 25 (24 chapters)
  text.txt      every third of the remaining chapters
  --full PATH   all remaining chapters (used to train the model; not committed)
"""

import argparse
import itertools
import pathlib
import re
import subprocess

HERE = pathlib.Path(__file__).resolve().parent


def read_chapters():
    """The chapters in order, each as one line of prose."""
    raw = subprocess.run(
        ["bible", "-f", "Ge1:1-Rev22:21"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout.decode("ascii")
    verses = []
    for line in raw.splitlines():
        if not line.strip():
            continue
        match = re.fullmatch(r"(\w+?\d+):\d+ (.*)", line)
        if match is None:
            raise SystemExit(f"unexpected line from the reader: {line!r}")
        verses.append((match.group(1), " ".join(match.group(2).split())))
    return [
        " ".join(text for _, text in group)
        for _, group in itertools.groupby(verses, key=lambda verse: verse[0])
    ]


def write(path, chapters):
    data = "\n\n".join(chapters) + "\n"
    path.write_text(data, encoding="utf-8", newline="\n")
    print(f"{path.name}: {len(chapters)} chapters, {len(data.encode())} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=HERE, help="folder to write to")
    parser.add_argument("--full", type=pathlib.Path, help="also write all training text here")
    args = parser.parse_args()

    chapters = read_chapters()
    if len(chapters) != 1189:
        raise SystemExit(f"expected 1189 chapters, found {len(chapters)}")
    held = [text for i, text in enumerate(chapters) if i % 50 == 25]
    rest = [text for i, text in enumerate(chapters) if i % 50 != 25]
    write(args.out / "heldout.txt", held)
    write(args.out / "text.txt", rest[::3])
    if args.full:
        write(args.full, rest)


if __name__ == "__main__":
    main()
