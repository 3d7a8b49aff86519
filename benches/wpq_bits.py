"""Compares codes of 32 and of 64 bits of `wpq` at equal bytes, on calibration text that was not calibrated on.

    python benches/wpq_bits.py KVSMITH REAL

REAL is the folder in which `make results` ran. Prints, for each share of the bytes, the mean KL of both, and for each block
the KL of 32 bits divided by that of 64 bits.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from lab import MIXED  # noqa: E402
from results import TOKENS, Results, by_block  # noqa: E402

CONTEXT, BLOCKS, SHARES = 8192, 4, (0.05, 0.1)


def beyond(results, text):
    """Returns the first blocks of a calibration text after the tokens that the artifact was calibrated on."""
    used = int(MIXED[text] * TOKENS)
    ids = results.ids(results.text(text), used + BLOCKS * CONTEXT)[used:]
    return [ids[at : at + CONTEXT] for at in range(0, len(ids), CONTEXT)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kvsmith", type=Path, help="the program")
    parser.add_argument("real", type=Path, help="the folder that `make real` made")
    arguments = parser.parse_args()
    results = Results(arguments.kvsmith, arguments.real)
    documents = beyond(results, "handbook") + beyond(results, "python")
    short = results.section("wpq-32", "wpq", ["--wpq-bits", 32])
    flags = ["--reads", ",".join(map(str, SHARES)), "--decode", 32]
    document = results.measure("wpq-bits", documents, "wpq", flags, [results.main, short])
    for share in SHARES:
        of_64, of_32 = (by_block(document, "wpq", name, share) for name in ("main", "wpq-32"))
        print(f"{share:.0%} of the bytes: KL {of_64.mean():.4f} with 64 bits, {of_32.mean():.4f} with 32; by block:",
              ", ".join(f"{ratio:.2f}" for ratio in of_32 / of_64))


if __name__ == "__main__":
    main()
