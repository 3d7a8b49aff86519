"""The documents in docs/results: one JSON file for each published table, with every row's losses by block or line."""

import json
import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "results"


def rounded(value):
    """Return a value with its numbers rounded to seven significant digits."""
    if isinstance(value, dict):
        return {key: rounded(of) for key, of in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(of) for of in value]
    if isinstance(value, float) or type(value).__module__ == "numpy":
        value = float(f"{float(value):.7g}")
        return int(value) if value.is_integer() and abs(value) < 1e15 else value
    return value


def dumps(document):
    """Return a document as JSON, with each row in a line of its own."""
    lines = []
    for key, value in rounded(document).items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in value)
            lines.append(f" {json.dumps(key)}: [\n{rows}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def save(name, document, folder=FOLDER):
    """Write the document of a table atomically."""
    folder.mkdir(exist_ok=True)
    part = folder / f"{name}.part"
    part.write_text(dumps(document), encoding="utf-8")
    os.replace(part, folder / f"{name}.json")


def load(name, folder=FOLDER):
    """Return the document of a table, or None if there is none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
