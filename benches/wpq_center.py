"""Compares two artifacts of one dump, made with `kvsmith wpq` with and without `--wpq-center mean`.

    kvsmith wpq --dump DUMP --wpq-center mean -o mean.safetensors
    kvsmith wpq --dump DUMP -o path.safetensors
    python benches/wpq_center.py mean.safetensors path.safetensors

Prints the share of the keys' variance that the path of their mean makes up, in the metric of the queries, and the error of
the codes on held-out keys. Needs only the standard library.
"""

import json
import statistics
import sys


def reports(path):
    """Returns the quality reports of the section wpq, one per KV head."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    quality = json.loads(header["__metadata__"]["kvsmith"])["quality"]
    return [report for layer in quality["wpq"] for report in layer]


def main():
    pairs = list(zip(*map(reports, sys.argv[1:3])))
    shares = [1 - path["variance"] / mean["variance"] for mean, path in pairs]
    errors = [path["held_out_inertia"] / mean["held_out_inertia"] for mean, path in pairs]
    print(f"share of the path: median {statistics.median(shares):.3f}, above a half in {sum(s > 0.5 for s in shares)} of {len(shares)} heads")
    print(f"held-out error, path over mean: median {statistics.median(errors):.2f}, largest {max(errors):.2f}, above 1 in {sum(e > 1 for e in errors)} heads")


if __name__ == "__main__":
    main()
