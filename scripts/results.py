"""Measure what every method loses on the real model: one document in docs/results for each table of docs/results.md.

    python results.py KVSMITH REAL [--only text,long,..] [--final]

REAL is the folder that `make real` made. Each table is written to docs/results/NAME.json when it ends; render.py makes the
pages from these documents. The script reuses every result in REAL/lab that the same program made with the same command, so a
stopped run continues. The tables:

    text              3,072 tokens, 10 and 20% of the bytes: every method with its paper's parameters, and tuned
    long              8,192 tokens, 5 and 10%: the same; wpq, a2ats and lfps with three artifacts
    same              the same blocks, in the same run, with an artifact calibrated on other chapters of the tested works
    claims            the parts of the methods that claims are about, at a budget of 6%
    questions-4096, questions-8192     eight and four questions about each of 20 texts, 10% of the bytes
    easy-4096         the same questions, fed with the prompt as papers do
    wpq-bits          wpq with codes of 32 and 64 bits, on development text
    wpq-center        wpq around the path of the mean and around the mean: the error of the codes
    row-formats       what full attention loses with caches of each format
    row-sums          what choosing and rounding lose apart and together
    row-reads         what `wpq` loses over rows of each format, and what plans of `tune` lose, at equal bytes in lines of memory

Unless a table says otherwise, text of one work is measured with artifacts that are calibrated on the other work. `--final`
measures the final texts instead, which no other command opens: once per version of Cargo.toml, and each use is noted in
docs/results/final-uses.json.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import numpy as np

import documents
from artifacts import keep_sections
from claims import BYPASS, SEARCHED
from lab import MIXED, WORKS, Lab, fail, manifest_of, require_apart, run
from sweep import SWEPT

METHODS = ("topk", "wpq", "selfindex", "lfps", "ctkvr", "a2ats", "quest", "pqcache", "doublesparsity", "randsign", "triattention", "snapkv", "h2o", "streaming")
TOKENS = 40_960
# Share of UUIDs in every artifact's calibration text.
UUIDS = MIXED["uuid"]
BLOCKS = 20
# Seed of the questions, and of those about the final text.
TASK_SEED, FINAL_SEED = 20263, 20300
# Texts of each length, and how many of the eight facts in a text are asked for: fewer where a prompt takes long, so that a
# table takes at most an hour.
TEXTS = 20
ASKED = {4096: 8, 8192: 4}
# Methods that are fitted, whose rows in the table `long` are means over the artifacts of FITS seeds and texts.
FITTED, FITS = ("a2ats", "lfps", "wpq"), 3
# Sections of the artifacts that tables need besides the main one.
SECTIONS = ("a2ats", "sign", "lfps", "wpq", "doublesparsity", "triattention")
# Forms of sections that are measured beside the defaults: the command that fits them, and their options.
FORMS = {"buckets": ("codebook", "--positions buckets --size 1024"), "all directions": ("wpq", "--wpq-directions all"), "mean": ("wpq", "--wpq-center mean")}
# The method of the section that a command fits.
FITS_OF = {"codebook": "a2ats", "wpq": "wpq"}
# Formats of keys and values, as flags of `eval`.
FORMATS = ("bf16", "int8", "int4+4", "k=int8,v=int4", "int4", "k=int4,v=int2", "int2", "2bit")
# Formats that are measured with a map of keys that is fitted to text, and those also with OSCAR's rotation.
MAPPED, COMPARED = ("int4+4", "k=int8,v=int4", "int4", "k=int4,v=int2", "int2"), ("int4", "int2")
# Formats over which an index chooses rows.
CHOSEN = ("bf16", "int8", "int4", "int4+4")
# Blocks on which sensitivities are measured; how results name a plan, and what serves its KV heads.
TUNED, PLAN, PER_HEAD = 2, "plan", "per KV head"
# Bytes of a line of memory, in which the reads of these rows are counted.
LINE = 64
FINAL_TEXTS = ("prose", "source", "dialogue")
USES = "final-uses"
# What a row keeps of the rows of `eval`.
KEPT = ("bytes_read_fraction", "bytes_moved_fraction", "uncompressed_moved_fraction", "kl", "kl_median", "kl_p99", "top1_equal", "perplexity_ratio", "recall", "mass",
        "output_error", "index_bits_per_token", "kl_by_block", "needle_accuracy", "by_task", "scores_by_line")


class Results(Lab):
    def __init__(self, kvsmith, real):
        super().__init__(kvsmith, real)
        self.methods = [method for method in METHODS if self.knows([method])]
        self.missing = [{"method": method, "why": f"{self.commit()} does not have it"} for method in METHODS if method not in self.methods]
        self.sweep = documents.load("sweep")

    # Artifacts

    def corpus_for(self, work, fit=0):
        """Return the corpus for text of a work: the other one, or both for None; further fits have other parts of the text."""
        parts = MIXED if work is None else {other: 1 - UUIDS for other in WORKS if other != work} | {"uuid": UUIDS}
        name = ("main" if work is None else f"for-{work}") + (f"-{fit}" if fit else "")
        options = ["--seq-len", 8192, "--holdout", 0.1, *(["--seed", fit] if fit else [])]
        return self.corpus(name, parts, TOKENS, options, first=fit * int(TOKENS * max(parts.values())))

    def of(self, work, fit=0):
        """Return the corpus and the artifact for text of a work: calibrated on the other one, or on both for None.

        Further fits have other seeds and other parts of the text.
        """
        corpus = self.corpus_for(work, fit)
        if work and not fit:
            return corpus, self.packed(corpus, SECTIONS)
        return corpus, self.calibrated(corpus, sections=FITTED if fit else ())

    def form(self, corpus, command, options):
        """Return a file with another form of a section, fitted to the corpus of an artifact."""
        name = re.sub(r"\W+", "-", f"{corpus.name} {command} {options}")
        return self.section(corpus, name, command, options.split())

    # Rows

    def tuned(self, length, shares):
        """Return what the sweep chose: (method, case, shares) for each choice, at the swept length nearest to `length`."""
        best = (self.sweep or {}).get("best", [])
        nearest = min({row["length"] for row in best}, key=lambda n: abs(n - length), default=None)
        found = {}
        for row in best:
            if row["length"] == nearest and row["share"] in shares:
                [case] = [case for case in SWEPT[row["entry"]][1] if case.options() == row["options"]]
                found.setdefault((row["entry"], row["options"]), (row["method"], case, []))[2].append(row["share"])
        return list(found.items())

    def measure(self, name, work, source, length, shares, also=(), forms=FORMS, fits=1, options=(), beside=None, same=False):
        """Return the rows of every method on a text of a work or on questions, at shares of the bytes.

        `source` gives the flags of `eval` for the text and the files that it depends on. The artifact `beside` is measured in the
        same run; with `same`, its rows are returned, without other forms of sections, in place of those of the artifact for the work.
        """
        corpus, artifact = self.of(work)
        names = [corpus.name]
        # By the artifact's name, the flags and the method: the form of a row, its options, and the shares at which it counts.
        wanted = {("", "", method): [("", "", shares)] for method in self.methods}
        artifacts, flags = {}, []
        for form, (command, words) in forms.items():
            path = self.form(corpus, command, words)
            artifacts[path.stem] = path
            wanted[path.stem, "", FITS_OF[command]] = [(form, words, shares)]
        for words in also:
            if self.knows(words.split()[:1]) and self.knows(re.findall(r"--[\w-]+", words)):
                method, own = words.split(" ", 1)
                flags.append(words)
                wanted["", own, method] = [(own, own, shares)]
        for (entry, words), (method, case, own_shares) in self.tuned(length, shares):
            if method not in self.methods:
                continue
            form = "tuned" if entry == method else f"{entry}, tuned"
            if case.section:
                path = self.form(corpus, case.section[0], " ".join(case.section[1:]))
                artifacts[path.stem] = path
                key = path.stem, "", method
            elif case.flags:
                if f"{method} {case.flags}" not in flags:
                    flags.append(f"{method} {case.flags}")
                key = "", case.flags, method
            else:
                key = "", "", method
            wanted.setdefault(key, []).append((form, words, own_shares))
            if case.section or case.flags:
                # The same run measures them at the other shares.
                searched = f"{entry + ', ' if entry != method else ''}{SEARCHED}{words}"
                wanted[key].append((searched, words, [share for share in shares if share not in own_shares]))
        fitted = {}
        for fit in range(1, fits):
            corpus_of_fit, of_fit = self.of(work, fit)
            names.append(corpus_of_fit.name)
            path = self.out / f"{of_fit.stem}-fitted.safetensors"
            keep_sections(of_fit, path, FITTED)
            artifacts[path.stem], fitted[path.stem] = path, fit
        if beside:
            artifacts[beside.stem] = beside
        source, inputs = source
        against = ["--against", ",".join(map(str, artifacts.values()))] if artifacts else []
        command = ["--artifact", artifact, *against, *source, "--methods", ",".join(self.methods), "--reads", ",".join(map(str, shares)),
                   *(word for words in flags for word in ("--also", words)), *options]
        document = self.eval(name, command, [*inputs, artifact, *artifacts.values()])
        rows = []
        for row, stem in of_artifact(document["rows"], artifact.stem, beside.stem if beside else None, same):
            own = row.get("flags", "")
            stem = "" if stem == artifact.stem or stem in fitted or same else stem
            for form, words, at in wanted.get((stem, own, row["method"]), ()):
                if row["reads_target"] in at:
                    rows.append(kept(row) | {"form": form, "options": words, "fit": fitted.get(Path(row.get("artifact", artifact)).stem, 0)})
        # What the rows were fitted to.
        fits = {name: self.fits[name] for name in ([beside.stem] if same else names)}
        if work is not None and not same:
            require_apart(fits, work)
        return {"calibration": fits, **conditions(document), "rows": over_fits(rows)}

    def on_text(self, name, blocks, shares, own=False, beside=None, same=False, fits=1, steps=24):
        """Return the table of a text; `blocks` gives the blocks of each work, each measured with the artifact for that work, or with `own`
        with that for both.
        """
        length = len(next(iter(blocks.values()))[0])
        found = []
        for work, documents_of in blocks.items():
            text = self.tokens(f"{name}-{work}", documents_of)
            # One table shows how good choices are.
            losses = [] if name == "text" else self.losses_only()
            source = ["--tokens", text, "--max-tokens", 10**9, "--seq-len", length, "--decode", steps, *losses], [text]
            found.append(self.measure(f"{name}-{work}", None if own else work, source, length, shares, [f"lfps {BYPASS}"],
                                      fits=fits, beside=beside, same=same))
        return {"length": length, "works": [work for work, of in blocks.items() for _ in of], **over_works(found)}

    # Tables

    def short(self):
        return self.on_text("text", {"handbook": self.blocks("handbook", 3072, BLOCKS)}, (0.1, 0.2))

    def long_blocks(self, count=BLOCKS):
        """Return blocks of 8,192 tokens of each work; where one is too short, there are more of the other."""
        of_handbook = self.blocks("handbook", 8192, count // 2)
        return {"handbook": of_handbook, "python": self.blocks("python", 8192, count - len(of_handbook))}

    def long(self, same=False):
        beside = self.of(None)[1]
        return self.on_text("long", self.long_blocks(), (0.05, 0.1), beside=beside, same=same, fits=FITS, steps=16)

    def same(self):
        return self.long(same=True)

    def asked(self, name, length, tasks, per_task, haystack="handbook-valid", folder="text", seed=TASK_SEED, work="handbook", options=()):
        path = self.out / f"{tasks.split(',')[0]}-{length}-{haystack}.jsonl"
        run([sys.executable, Path(__file__).with_name("tasks.py"), "--haystack", self.real / folder / f"{haystack}.txt",
             "--lengths", length, "--tasks", tasks, "--per-task", per_task, "--asked", ASKED[length], "--seed", seed,
             "--tokenizer", self.real / "model" / "tokenizer.json", "-o", path])
        forms = {"buckets": FORMS["buckets"]}
        source = ["--needles", path], [path]
        document = self.measure(f"{name}-{length}", work, source, length, (0.1,), [f"lfps {BYPASS}"], forms, options=options)
        asked = sum(np.size(scores) for scores in document["full_scores_by_line"])
        return {"length": length, "protocol": "prefill" if options else "decode", "haystack": haystack, "questions": asked, **document}

    def questions(self, length):
        return self.asked("questions", length, "turns", TEXTS)

    def easy(self, length):
        if not self.knows(["--question", "prefill"]):
            fail(f"{self.commit()} does not know --question prefill", "measure this table with a newer program")
        return self.asked("easy", length, "turns", TEXTS, options=["--question", "prefill"])

    def claims(self):
        """Evaluate every part of a method that a claim is about, at the papers' usual budget."""
        corpus, artifact = self.of("python")
        require_apart(self.fits, "python")
        text = self.tokens("claims", self.blocks("python", 2048, BLOCKS))
        moments = self.out / f"{corpus.name}-moments.safetensors"
        dump = self.dump(corpus)
        self.once(moments, ["moments", "--dump", dump, "--rope", "standard", "-o", moments, "--overwrite"], [dump / "manifest.json"])
        size = "--size 1024"
        forms = {
            "plain": ("codebook", f"{size} --metric plain"),
            "standard": ("codebook", f"{size} --moments {moments}"),
            "standard, plain": ("codebook", f"{size} --moments {moments} --metric plain"),
            "buckets": FORMS["buckets"],
            "32 bits": ("wpq", "--wpq-bits 32"),
        }
        files = {form: self.section(corpus, f"{corpus.name}-{re.sub(r'[^a-z0-9]+', '-', form)}-claims", command, words.split())
                 for form, (command, words) in forms.items()}
        also = ["selfindex --sign-centroids signs", "lfps --lfps-prior 0", f"lfps {BYPASS}", "lfps --lfps-rows 0",
                *(f"ctkvr --ct-choose {way}" for way in ("even", "random", "first")), "ctkvr --ct-probes 2"]
        signs = also[:1]
        evals = {
            "base": ("bf16", "topk,a2ats,selfindex,lfps,ctkvr,wpq", ["--decode", 24], also, list(files.values())),
            "2bit-full": ("2bit", "selfindex", ["--decode", 24], signs, []),
            "2bit-plain": ("2bit", "selfindex", ["--decode", 24, "--plain-keys"], [], []),
            "2bit-all": ("2bit", "selfindex", ["--decode", 24, "--sign-full", 0], [], []),
            "turns": ("bf16", "ctkvr", ["--turns", 8, "--decode", 8, "--ct-keep"], ["ctkvr --ct-keep --ct-update 0"], []),
        }
        names, rows, found = {path.stem: form for form, path in files.items()}, [], {}
        for part, (kv, methods, options, more, others) in evals.items():
            against = ["--against", ",".join(map(str, others))] if others else []
            command = ["--artifact", artifact, *against, "--tokens", text, "--max-tokens", 10**9, "--seq-len", 2048, "--methods", methods,
                       "--budgets", "0.06", *self.losses_only(), *options, *(word for words in more for word in ("--also", words))]
            document = self.eval(f"claims-{part}", command, [text, artifact, *others], kv)
            found = found or conditions(document)
            for row in document["rows"]:
                form = row.get("flags") or names.get(Path(row.get("artifact", artifact)).stem) or ("--ct-keep" if part == "turns" else "")
                rows.append(kept(row) | {"form": form, "part": part})
        return {"length": 2048, "works": ["python"] * BLOCKS, **found, "rows": rows}

    def wpq_bits(self):
        """Compare codes of 32 and 64 bits at equal bytes on development text."""
        corpus, artifact = self.of(None)
        text = self.tokens("wpq-bits", [block for work in WORKS for block in self.blocks(work, 8192, 4, "development")])
        short = self.form(corpus, "wpq", "--wpq-bits 32")
        command = ["--artifact", artifact, "--against", short, "--tokens", text, "--max-tokens", 10**9, "--seq-len", 8192, "--methods", "wpq",
                   "--reads", "0.05,0.1", "--decode", 32, *self.losses_only()]
        document = self.eval("wpq-bits", command, [text, artifact, short])
        rows = [kept(row) | {"form": "32 bits" if Path(row["artifact"]).stem == short.stem else ""} for row in document["rows"]]
        return {"text": "development", "length": 8192, **conditions(document), "rows": rows}

    def wpq_center(self):
        """Compare the codes around the path of the mean with those around the mean, both fitted to one dump, on held-out keys."""
        corpus, artifact = self.of(None)
        mean, path = self.form(corpus, "wpq", "--wpq-center mean"), self.form(corpus, "wpq", "--wpq-center path")
        both = [manifest_of(of)["quality"]["wpq"] for of in (mean, path)]
        if both[1] != manifest_of(artifact)["quality"]["wpq"]:
            fail("the section wpq of a dump differs from that of calibrate", "the two forms would differ in more than the center")
        rows = [{"layer": layer, "kv_head": head, "mean": of_mean, "path": of_path}
                for layer, pair in enumerate(zip(*both)) for head, (of_mean, of_path) in enumerate(zip(*pair))]
        keys = ("variance", "held_out_inertia")
        return {"text": "held-out keys", "rows": [{k: {key: v[key] for key in keys} if isinstance(v, dict) else v for k, v in row.items()} for row in rows]}

    def row_formats(self):
        """Measure what full attention loses with caches of each format. Maps of keys are fitted to the other work."""
        text = self.tokens("row-formats", self.blocks("handbook", 2048, BLOCKS))
        corpus = self.corpus_for("handbook")
        maps = {form: self.checked(corpus, self.form(corpus, "rotation", f"--rotation-form {form}")) for form in ("balanced", "orthogonal")}
        require_apart(self.fits, "handbook")
        rows, found = [], {}
        for form, formats in (("hadamard", FORMATS), ("balanced", MAPPED), ("orthogonal", COMPARED)):
            artifact = [maps[form]] if form in maps else []
            flags = ["--artifact", *artifact] if artifact else ["--rotation", form]
            command = [*flags, "--tokens", text, "--max-tokens", 10**9, "--seq-len", 2048, "--methods", "full", "--decode", 32, *self.losses_only()]
            document, of_form = self.in_formats(f"row-formats-{form}", formats, command, [text, *artifact], "artifact" if artifact else form)
            found = found or conditions(document)
            rows += [kept(row) | {"kv": kv, "maps": form} for kv, row in of_form]
        return {"calibration": dict(self.fits), "length": 2048, "works": ["handbook"] * BLOCKS, **found, "rows": rows}

    def in_formats(self, name, formats, command, inputs, rotation):
        """Return the document of an `eval` of caches of several formats, and its rows, each with its format."""
        first, *others = formats
        document = self.eval(name, [*command, *(word for kv in others for word in ("--also-kv", kv))], inputs, first)
        if (document["device"], document["kv"], document["rotation"], document["granule"]) != ("cpu", first, rotation, LINE):
            fail(f"`eval --kv {first}` measured {document['kv']} with the maps {document['rotation']} on {document['device']}", "report this")
        return document, [(row.get("kv", first), row) for row in document["rows"]]

    def row_sums(self):
        """Measure what choosing and rounding lose apart and together; everything is fitted to the other work."""
        text = self.tokens("row-formats", self.blocks("handbook", 2048, BLOCKS))
        corpus = self.corpus_for("handbook")
        artifact = self.packed(corpus, ("wpq", "rotation"))
        require_apart(self.fits, "handbook")
        command = ["--artifact", artifact, "--tokens", text, "--max-tokens", 10**9, "--seq-len", 2048, "--methods", "full,wpq", "--budgets", 0.05,
                   "--decode", 16, *self.losses_only()]
        document, rows = self.in_formats("row-sums", ("bf16", "int4", "int2"), command, [text, artifact], "artifact")
        return {"calibration": dict(self.fits), "length": 2048, "works": ["handbook"] * BLOCKS, **conditions(document),
                "rows": [kept(row) | {"kv": kv} for kv, row in rows]}

    def row_reads(self):
        """Measure what `wpq` and full attention lose over rows of each format, and what tuned plans lose; everything is fitted to the other work."""
        found, works = [], self.long_blocks()
        for work, documents_of in works.items():
            text = self.tokens(f"row-reads-{work}", documents_of)
            corpus = self.corpus_for(work)
            artifact = self.packed(corpus, ("wpq", "rotation"))
            fits = {corpus.name: self.fits[corpus.name]}
            require_apart(fits, work)
            command = ["--artifact", artifact, "--tokens", text, "--max-tokens", 10**9, "--seq-len", 8192, "--granule", LINE, "--decode", 16,
                       *self.losses_only()]
            rows = []
            for method, options in (("full", []), ("wpq", ["--reads", "0.05,0.1"])):
                document, of_method = self.in_formats(f"row-reads-{work}-{method}", CHOSEN, [*command, "--methods", method, *options], [text, artifact], "artifact")
                rows += [kept(row) | {"form": kv, "share": row.get("reads_target", 1), "options": ""} for kv, row in of_method]
            for share, plan in self.plans(work, artifact, (0.05, 0.1)).items():
                options = ["--methods", "full", "--budgets", 1, "--head-plan", plan]
                of_plan = self.eval(f"row-reads-{work}-plan-{share}", [*command, *options], [text, artifact, plan], None)
                [row] = [row for row in of_plan["rows"] if row["method"] == PLAN]
                rows.append(kept(row | {"budget": PER_HEAD}) | {"form": PER_HEAD, "share": share, "options": ""})
            found.append({"calibration": fits, **conditions(document), "rows": rows})
        return {"length": 8192, "works": [work for work, of in works.items() for _ in of], **over_works(found)}

    def plans(self, work, artifact, shares):
        """Return, for each share of the bytes, the plan per KV head that `tune` finds on development text of the other work."""
        [other] = [other for other in WORKS if other != work]
        text = self.tokens(f"plans-{work}", self.blocks(other, 8192, TUNED, "development"))
        measured, found = None, {}
        for share in shares:
            path = self.out / f"plan-{work}-{share}.json"
            limit = ["--limit", f"bytes={share}", "-o", path, "--overwrite"]
            source, inputs = (["--from", measured], [measured]) if measured else (
                [artifact, "--model", self.real / "model", "--tokens", text, "--other-text", "--seq-len", 8192, "--length", 8192, "--blocks", TUNED, "--check", 0], [artifact, text])
            found[share] = self.once(path, ["tune", *source, *limit], inputs)
            measured = measured or path
        return found

    def final(self):
        """Measure the final texts: yield the name and the document of each table."""
        def blocks(name, size, count):
            ids = self.ids((self.real / "final" / f"{name}-final.txt").read_text(encoding="utf-8"), size * count)
            return [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]

        for name, size, counts, shares, steps in (("text", 3072, (10, 10, 8), (0.1, 0.2), 24), ("long", 8192, (9, 9, 3), (0.05, 0.1), 16)):
            each = {kind: blocks(kind, size, count) for kind, count in zip(FINAL_TEXTS, counts)}
            yield f"final-{name}", self.on_text(f"final-{name}", each, shares, own=True, steps=steps)
        yield "final-questions-4096", self.asked("final-questions", 4096, "turns", TEXTS, "prose-final", "final", FINAL_SEED, None)


TABLES = {"text": Results.short, "long": Results.long, "same": Results.same, "claims": Results.claims,
          "questions-4096": lambda of: of.questions(4096), "questions-8192": lambda of: of.questions(8192), "easy-4096": lambda of: of.easy(4096),
          "wpq-bits": Results.wpq_bits, "wpq-center": Results.wpq_center, "row-formats": Results.row_formats,
          "row-sums": Results.row_sums, "row-reads": Results.row_reads}


def of_artifact(rows, own, beside, same):
    """Return rows of `eval` with the names of their artifacts: with `same`, those of the artifact `beside` and of methods without
    a section; otherwise all but those of `beside`.

    `own` names the artifact of rows that name none.
    """
    named = [(row, Path(row.get("artifact", own)).stem) for row in rows]
    has_section = {row["method"] for row, stem in named if stem == beside}
    if not same:
        return [(row, stem) for row, stem in named if stem != beside]
    return [(row, stem) for row, stem in named if stem == (beside if row["method"] in has_section else own)]


def kept(row):
    """Return what a table keeps of a row of `eval`."""
    found = {"method": row["method"], "share": row.get("reads_target"), "budget": row["budget"]}
    found = {key: value for key, value in found.items() if value is not None or key == "budget"}
    if row["budget"] is None:
        return found | {"least": row["reads_sample"]}
    return found | {key: row[key] for key in KEPT if row.get(key) is not None}


def conditions(document):
    """Return what a table says about the whole measurement."""
    return {key: document[key] for key in ("blocks", "steps", "needles", "full_needle_accuracy", "full_by_task", "full_scores_by_line", "granule") if key in document}


def over_fits(rows):
    """Replace the rows that differ in the fit alone by one row, with the means over the fits and the losses of each."""
    found = {}
    for row in rows:
        found.setdefault((row["method"], row["form"], row["share"]), []).append(row)
    merged = []
    for each in found.values():
        first = {key: value for key, value in each[0].items() if key != "fit"}
        if len(each) > 1 and all("kl_by_block" in row for row in each):
            losses = [row["kl_by_block"] for row in sorted(each, key=lambda row: row["fit"])]
            first |= mean_of(each, [1] * len(each)) | {"kl_by_fit": losses, "kl_by_block": np.mean(losses, 0).tolist(), "budget": [row["budget"] for row in each]}
        merged.append(first)
    return merged


def over_works(found):
    """Merge the tables of several works into one."""
    rows = []
    for row in found[0]["rows"]:
        key = row["method"], row["form"], row["share"]
        each = [[other for other in document["rows"] if (other["method"], other["form"], other["share"]) == key] for document in found]
        if len(found) == 1 or any(not of for of in each):
            rows.append(row)
            continue
        each = [of for [of] in each]
        if any(of["budget"] is None for of in each):
            rows.append({key: row[key] for key in ("method", "form", "options", "share")} | {
                "budget": None, "least": max(of["least"] for of in each if of["budget"] is None)})
            continue
        merged = row | mean_of(each, [len(of["kl_by_block"]) for of in each])
        merged |= {"kl_by_block": [loss for of in each for loss in of["kl_by_block"]], "budget": [of["budget"] for of in each]}
        if "kl_by_fit" in row:
            merged["kl_by_fit"] = np.concatenate([of["kl_by_fit"] for of in each], 1).tolist()
            merged["budget"] = [budget for of in each for budget in of["budget"]]
        rows.append(merged)
    first = dict(found[0])
    for key in ("blocks", "steps"):
        first[key] = sum(document[key] for document in found)
    calibration = {name: fit for document in found for name, fit in document["calibration"].items()}
    return first | {"calibration": calibration, "rows": rows}


def mean_of(rows, weights):
    """Return the means of the metrics of several rows; those of single steps have no mean."""
    found = {}
    for key in KEPT:
        values = [row.get(key) for row in rows]
        if any(not isinstance(value, (int, float)) for value in values):
            continue
        if key == "perplexity_ratio":
            values = np.log(values)
        mean = float(np.average(values, weights=weights))
        found[key] = float(np.exp(mean)) if key == "perplexity_ratio" else mean
    return found | {"kl_median": None, "kl_p99": None}


def version():
    """Return the version in Cargo.toml."""
    manifest = (Path(__file__).resolve().parent.parent / "Cargo.toml").read_text(encoding="utf-8")
    return re.search(r'^version = "(.*)"', manifest, re.MULTILINE)[1]


def open_final(program, uses):
    """Note a use of the final texts; stop the script if this version has used them. A run that was stopped may continue.

    Returns the uses with this one.
    """
    mine = [use for use in uses if use["version"] == version()]
    if mine and (mine[0]["finished"] or mine[0]["program"] != program):
        fail(f"version {version()} has measured the final texts: docs/results/{USES}.json",
             "measure validation text, or raise the version in Cargo.toml for a release")
    return uses if mine else [*uses, {"version": version(), "program": program, "finished": False}]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kvsmith", type=Path, help="the program")
    parser.add_argument("real", type=Path, help="the folder that `make real` made")
    parser.add_argument("--only", default="all", help=f"tables to measure: {', '.join(TABLES)} (default: all)")
    parser.add_argument("--final", action="store_true", help="measure the final texts instead, once per version")
    arguments = parser.parse_args()
    chosen = list(TABLES) if arguments.only == "all" else arguments.only.split(",")
    if unknown := [name for name in chosen if name not in TABLES]:
        parser.error(f"no such table: {', '.join(unknown)}")
    results = Results(arguments.kvsmith, arguments.real)

    def save(name, document):
        head = {"table": name, "program": results.commit(), "text": "final" if arguments.final else "validation"}
        documents.save(name, head | {"calibration": results.fits} | document | {"missing": results.missing})

    if arguments.final:
        uses = open_final(results.program, (documents.load(USES) or {"uses": []})["uses"])
        documents.save(USES, {"uses": uses})
        for name, document in results.final():
            save(name, document)
        documents.save(USES, {"uses": [use | {"finished": use["finished"] or use["program"] == results.program} for use in uses]})
        return
    for name in chosen:
        results.fits.clear()
        save(name, TABLES[name](results))


if __name__ == "__main__":
    main()
