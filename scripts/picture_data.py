"""Write the data that the pictures of a report show to docs/pictures/report.json, and its digest into the pictures.

    python picture_data.py REPORT.html

The digest is a text chunk of each PNG file, `kvsmith-report` and the sha256 of report.json in hex. A test compares them.
"""

import hashlib
import json
import struct
import sys
import zlib
from pathlib import Path

from intervals import FEWEST

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
KEYWORD = b"kvsmith-report"
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def data_of(page):
    """Return the data of a report as JSON, without the paths of the machine that made it."""
    _, rest = page.split('<script type="application/json" id="data">', 1)
    data = json.loads(rest.split("</script>", 1)[0])
    data["argument"] = data["file"]
    require_measured(data["inspect"])
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n"


def require_measured(inspect):
    """Stop the script unless the artifact was fitted to every kind of its text, and its losses have intervals."""
    kinds = inspect["calibration"]["kinds"]
    if missing := [kind["kind"] for kind in kinds if kind["fitted_tokens"] == 0]:
        sys.exit(f"error: the artifact was fitted to no tokens of {', '.join(missing)}\nhint: calibrate on more of it")
    if inspect["methods"]["blocks"] < FEWEST:
        sys.exit(f"error: losses were measured on {inspect['methods']['blocks']} blocks\nhint: give text beyond --max-tokens for {FEWEST} blocks")


def chunks(png):
    """Yield the kind and the content of each chunk of a PNG file."""
    at = len(SIGNATURE)
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        yield kind, png[at + 8 : at + 8 + size]
        at += 12 + size


def marked(png, digest):
    """Return a PNG file with the digest in it, in place of an older one."""
    out = SIGNATURE
    for kind, content in chunks(png):
        if kind == b"tEXt" and content.startswith(KEYWORD):
            continue
        new = [(kind, content)]
        if kind == b"IHDR":
            new.append((b"tEXt", KEYWORD + b"\0" + digest.encode()))
        for name, of in new:
            out += struct.pack(">I", len(of)) + name + of + struct.pack(">I", zlib.crc32(name + of))
    return out


def main():
    data = data_of(Path(sys.argv[1]).read_text(encoding="utf-8"))
    (FOLDER / "report.json").write_text(data, encoding="utf-8")
    digest = hashlib.sha256(data.encode()).hexdigest()
    for picture in FOLDER.glob("report-*.png"):
        picture.write_bytes(marked(picture.read_bytes(), digest))


if __name__ == "__main__":
    main()
