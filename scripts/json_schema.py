"""The JSON Schema of the documents of `--json`, made from the tables of docs/reference/json.md.

`tests/json.rs` runs every command and compares its documents with the same tables.
"""

import json
import re

TYPES = {"number": "number", "string": "string", "boolean": "boolean", "list": "array", "object": "object", "null": "null"}
COMMON, FAILURE = "Every command", "A failure"
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \| (.+) \|$", re.MULTILINE)
DESCRIPTION = ("What kvsmith prints with --json: one document of one command. Of its keys, few are required, since a document of a command that failed "
               "has `error` instead of the command's keys. New keys may appear without notice.")


def tables(page):
    """Return the rows of the tables: for each command, the types and the meaning of each key."""
    found = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        if rows := ROW.findall(text):
            for command in title.split(", "):
                found[command] = {key: (types.strip(), meaning.strip()) for key, types, meaning in rows}
    return found


def plain(meaning):
    """Return a meaning without its Markdown links."""
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", meaning)


def schema_of(types, meaning):
    """Return the schema of a value; the keys that its meaning lists may have any type."""
    names = [TYPES[name] for name in types.split(" or ")]
    found = {"description": plain(meaning), "type": names[0] if len(names) == 1 else names}
    _, _, listed = meaning.partition("Keys: ")
    if names_within := re.findall(r"`([a-z0-9_]+)`", listed):
        within = {"type": "object", "properties": {name: {} for name in names_within}}
        found |= {"items": within} if "array" in names else {"properties": within["properties"]}
    return found


def place(schema, key, value):
    """Put the schema of a key such as `rows[].kl` or `shards.seconds` into that of a document."""
    *parents, name = key.split(".")
    for parent in parents:
        schema = schema["properties"][parent.removesuffix("[]")]
        if parent.endswith("[]"):
            schema = schema.setdefault("items", {"type": "object"})
        schema.setdefault("properties", {})
    # A row of its own says more than a place in the list of another row.
    schema["properties"][name] = value


def document_of(rows):
    """Return the schema of an object with the keys of a table."""
    schema = {"properties": {}}
    for key, (types, meaning) in rows.items():
        place(schema, key, schema_of(types, meaning))
    return schema


def schema(page):
    """Return the schema for the text of docs/reference/json.md, as text."""
    found = tables(page)
    common = document_of(found.pop(COMMON) | found.pop(FAILURE))
    commands = {command: document_of(rows) for command, rows in found.items()}

    def case(command):
        return {"if": {"properties": {"command": {"const": command}}}, "then": {"$ref": f"#/$defs/{command.replace(' ', '-')}"}}

    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Documents of kvsmith --json",
        "description": DESCRIPTION,
        "type": "object",
        "required": ["command", "schema", "version"],
        **common,
        "allOf": [case(command) for command in commands],
        "$defs": {command.replace(" ", "-"): rows for command, rows in commands.items()},
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
