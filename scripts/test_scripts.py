"""Tests of the scripts that measure the real model, without a model: python -m unittest discover -s scripts."""

import json
import re
import struct
import unittest
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import claims
import documents
import intervals
import json_schema
import lab
import picture_data
import pictures
import render
import results
import sentences
import study
import sweep
import tables

# The layout of an earlier version: UUIDs as a third document of text, of which the draw held out everything.
DOCUMENTS = [("handbook", 128), ("python", 128), ("uuid", 64)]
MANIFEST = {"calibration": {"seq_len": 64, "tokens": 320, "blocks": 5, "held_out": [[4, 0, 64]]}}


class Fits(unittest.TestCase):
    def test_fitted_tokens_are_those_that_were_not_held_out(self):
        self.assertEqual(lab.fitted_tokens(MANIFEST, DOCUMENTS), {"handbook": 128, "python": 128, "uuid": 0})
        half = {"calibration": MANIFEST["calibration"] | {"held_out": [[1, 0, 64], [4, 58, 64]]}}
        self.assertEqual(lab.require_fitted(half, DOCUMENTS), {"handbook": 64, "python": 128, "uuid": 58})

    def test_a_kind_of_text_without_fitted_tokens_stops_the_script(self):
        with self.assertRaises(SystemExit) as stopped:
            lab.require_fitted(MANIFEST, DOCUMENTS)
        self.assertIn("no tokens of uuid", str(stopped.exception))

    def test_a_program_without_a_commit_measures_nothing(self):
        self.assertEqual(lab.known_commit("kvsmith 0.1.0, commit: 1e4242e"), "kvsmith 0.1.0, commit: 1e4242e")
        with self.assertRaises(SystemExit):
            lab.known_commit("kvsmith 0.1.0, commit: unknown")

    def test_text_of_a_work_is_measured_with_artifacts_of_others(self):
        fits = {"for-python": {"tokens": {"handbook": 9, "uuid": 1}}}
        results.require_apart(fits, "python")
        with self.assertRaises(SystemExit) as stopped:
            results.require_apart(fits | {"main": {"tokens": {"handbook": 9, "python": 9}}}, "python")
        self.assertIn("main", str(stopped.exception))

    def test_artifacts_of_another_device_or_version_stop_the_script(self):
        manifest = {"tool_version": "0.1.0", "sections": {"wpq": {"device": "cpu"}, "lfps": {"device": "cpu"}}}
        self.assertEqual(lab.require_made(manifest, "0.1.0"), {"device": "cpu", "version": "0.1.0"})
        with self.assertRaises(SystemExit) as stopped:
            lab.require_made(manifest, "0.2.0")
        self.assertIn("made by kvsmith 0.1.0", str(stopped.exception))
        manifest["sections"]["lfps"]["device"] = "cuda"
        with self.assertRaises(SystemExit) as stopped:
            lab.require_made(manifest, "0.1.0")
        self.assertIn("cuda", str(stopped.exception))

    def test_another_layout_than_that_of_the_artifact_stops_the_script(self):
        with self.assertRaises(SystemExit):
            lab.fitted_tokens(MANIFEST, DOCUMENTS[:2])


class Intervals(unittest.TestCase):
    def test_exact_p_values(self):
        # Of the 32 changes of signs, 2 give a mean as far from 0.
        self.assertEqual(intervals.sign_flip([1.0] * 5), 2 / 32)
        # 3 + 1 + 1, -3 - 1 - 1.
        self.assertEqual(intervals.sign_flip([3.0, 1.0, 1.0]), 2 / 8)
        self.assertEqual(intervals.sign_flip([1.0, -1.0]), 1.0)

    def test_holm(self):
        # 3 x 0.01, then 2 x 0.02, then the larger of 1 x 0.03 and what came before.
        np.testing.assert_allclose(intervals.holm([0.02, 0.01, 0.03]), [0.04, 0.03, 0.04])

    def test_few_blocks_have_no_interval(self):
        losses = np.linspace(0.0, 1.0, 20)
        self.assertIsNone(intervals.mean_interval(losses[:19]))
        self.assertIsNone(intervals.fits_interval(np.ones((3, 19))))
        low, high = intervals.mean_interval(losses)
        self.assertTrue(low < losses.mean() < high)

    def test_an_interval_of_fits_contains_their_spread(self):
        losses = np.array([[1.0], [2.0], [3.0]]) + 0.01 * np.linspace(-1, 1, 20)
        low, high = intervals.fits_interval(losses)
        self.assertLess(low, 1.4)
        self.assertGreater(high, 2.6)

    def test_the_block_that_makes_the_mean(self):
        self.assertAlmostEqual(intervals.largest_share([8.0, 1.0, 1.0]), 0.8)
        self.assertAlmostEqual(intervals.largest_share([-8.0, -1.0, -1.0]), 0.8)


class Claims(unittest.TestCase):
    def test_verdicts(self):
        def row(method, losses):
            return {"method": method, "form": "", "part": "base", "kl_by_block": losses, "bytes_read_fraction": 0.1}

        losses = np.linspace(0.01, 0.02, 20)
        [of] = [of for of in claims.judged({"claims": {"rows": [row("wpq", losses + 0.001), row("topk", losses)]}})]
        self.assertEqual((of["verdict"], of["after_holm"]), ("false", "false"))
        self.assertAlmostEqual(of["difference"], 0.001)
        self.assertEqual(of["p"], 2 / 2**20)
        [of] = claims.judged({"claims": {"rows": [row("wpq", losses[:6]), row("topk", losses[:6] + 1)]}})
        self.assertEqual(of["verdict"], "too few blocks")


class Merging(unittest.TestCase):
    ROW = {"method": "wpq", "form": "", "options": "", "share": 0.1, "budget": 0.05, "kl": 2.0, "perplexity_ratio": 1.0, "kl_median": 1.0}

    def test_rows_of_several_fits(self):
        rows = [self.ROW | {"fit": fit, "kl": kl, "kl_by_block": [kl, kl], "perplexity_ratio": of} for fit, kl, of in ((0, 1.0, 1.0), (1, 3.0, 4.0))]
        [row] = results.over_fits(rows)
        self.assertEqual((row["kl"], row["kl_by_fit"], row["kl_by_block"]), (2.0, [[1.0, 1.0], [3.0, 3.0]], [2.0, 2.0]))
        self.assertAlmostEqual(row["perplexity_ratio"], 2.0)
        self.assertIsNone(row["kl_median"])

    def test_rows_of_two_artifacts_in_one_run(self):
        rows = [{"method": "topk"}, {"method": "wpq", "artifact": "a/for-python.safetensors"}, {"method": "wpq", "artifact": "a/main.safetensors"},
                {"method": "wpq", "artifact": "a/for-python-wpq-mean.safetensors"}]
        of = lambda same: [stem for _, stem in results.of_artifact(rows, "for-python", "main", same)]
        self.assertEqual(of(False), ["for-python", "for-python", "for-python-wpq-mean"])
        self.assertEqual(of(True), ["for-python", "main"])

    def test_rows_of_several_works(self):
        few, many = ({"blocks": len(of), "steps": 10, "calibration": {f"for-{len(of)}": {}}, "rows": [self.ROW | {"kl": np.mean(of), "kl_by_block": of}]}
                     for of in ([1.0], [4.0, 4.0]))
        merged = results.over_works([few, many])
        [row] = merged["rows"]
        self.assertEqual((merged["blocks"], merged["steps"], row["kl"], row["kl_by_block"]), (3, 20, 3.0, [1.0, 4.0, 4.0]))
        self.assertEqual(list(merged["calibration"]), ["for-1", "for-2"])
        many["rows"][0] |= {"budget": None, "least": 0.2}
        [row] = results.over_works([few, many])["rows"]
        self.assertEqual((row["budget"], row["least"]), (None, 0.2))

    def test_the_best_options_read_no_more_than_their_share(self):
        row = {"entry": "lfps", "method": "lfps", "length": 8192, "share": 0.1}
        rows = [row | {"options": "a", "budget": 0.1, "bytes_read_fraction": 0.12, "kl": 0.1}, row | {"options": "b", "budget": None},
                row | {"options": "c", "budget": 0.1, "bytes_read_fraction": 0.1, "kl": 0.3}, row | {"options": "d", "budget": 0.1, "bytes_read_fraction": 0.1, "kl": 0.2}]
        self.assertEqual([best["options"] for best in sweep.best(rows)], ["d"])


class Final(unittest.TestCase):
    def test_a_version_opens_the_final_texts_once(self):
        uses = results.open_final("one", [])
        self.assertEqual([use["finished"] for use in uses], [False])
        self.assertEqual(results.open_final("one", uses), uses, "a stopped run may continue")
        with self.assertRaises(SystemExit):
            results.open_final("another", uses)
        with self.assertRaises(SystemExit):
            results.open_final("one", [uses[0] | {"finished": True}])
        older = [uses[0] | {"version": "0.0.1", "finished": True}]
        self.assertEqual(len(results.open_final("one", older)), 2)


class Labs(unittest.TestCase):
    def test_no_script_replaces_a_method_of_the_lab(self):
        own = {name for name, of in vars(lab.Lab).items() if callable(of) and not name.startswith("__")}
        self.assertIn("text", own)
        for script in (results.Results, study.Study, sweep.Sweep):
            self.assertEqual(own & vars(script).keys(), set(), script)


class Studies(unittest.TestCase):
    def test_works_are_merged_in_one_order(self):
        def row(work, index, losses, read):
            return {"work": work, "method": "wpq", "index": index, "flags": "", "budget": 0.1, "bytes_read_fraction": read,
                    "kl": sum(losses) / len(losses), "kl_by_block": losses}

        first, second = study.over_works([row("python", "a", [0.1, 0.3], 0.2), row("handbook", "b", [0.5], 0.1), row("python", "b", [0.2, 0.2], 0.1),
                                          row("handbook", "a", [0.4], 0.1)])
        self.assertEqual((first["index"], first["kl_by_block"], first["kl_by_work"]), ("a", [0.4, 0.1, 0.3], {"handbook": 0.4, "python": 0.2}))
        self.assertAlmostEqual(first["kl"], 0.8 / 3)
        self.assertAlmostEqual(first["bytes_read_fraction"], 0.5 / 3)
        self.assertEqual((second["index"], second["kl_by_block"]), ("b", [0.5, 0.2, 0.2]))


class Artifacts(unittest.TestCase):
    def test_the_index_without_data_keeps_nothing_of_the_calibration(self):
        layers, heads, d = 2, 1, 64
        tensors = {"wpq.chol": np.ones((layers, heads, d, d), np.float32), "wpq.mean": np.ones((layers, heads, d), np.float32),
                   "wpq.mean_pre": np.ones((layers, heads, d), np.float32), "wpq.codebook": np.ones((layers, heads, 2, 8, 16, 4), np.float16)}
        manifest = {"sections": {"wpq": {"center": "path", "directions": 32}}}
        study.without_data(np.array([[1.0], [2.0]]))(tensors, manifest, np.random.default_rng(1))
        self.assertEqual((manifest["sections"]["wpq"]["center"], manifest["sections"]["wpq"]["directions"]), ("mean", d))
        self.assertNotIn("wpq.mean_pre", tensors)
        self.assertEqual(np.abs(tensors["wpq.mean"]).max(), 0)
        # One bit of each of 64 normal channels: of the size's square, 1 - 2 / pi is left.
        draw = np.random.default_rng(2).normal(size=(200, d)) * 2
        words = tensors["wpq.codebook"][1, 0].astype(np.float64)
        left = 0.0
        for key in draw @ tensors["wpq.rotation"][1, 0]:
            groups = np.stack([key[group::8] for group in range(8)])
            for stage in words:
                nearest = ((groups[:, None] - stage) ** 2).sum(-1).argmin(1)
                groups = groups - stage[np.arange(8), nearest]
            left += (groups**2).mean() / len(draw)
        self.assertAlmostEqual(left / 4, 1 - 2 / np.pi, delta=0.02)


class Pages(unittest.TestCase):
    def test_documents_are_read_as_they_were_written(self):
        with TemporaryDirectory() as folder:
            documents.save("one", {"shares": (0.05, np.float64(0.1)), "rows": [{"kl": 1 / 3, "kl_by_block": [1e-9]}]}, Path(folder))
            self.assertEqual(documents.load("one", Path(folder)), {"shares": [0.05, 0.1], "rows": [{"kl": 0.3333333, "kl_by_block": [1e-9]}]})
            self.assertIsNone(documents.load("another", Path(folder)))

    def test_a_table_of_a_page_is_of_its_own_document(self):
        row = {"method": "wpq", "flags": "", "bytes_read_fraction": 0.1}
        rows = [row | {"index": index, "kl": kl, "kl_by_block": [kl] * 20, "kl_by_work": {"handbook": kl, "python": kl}} for index, kl in (("calibrated", 0.25), ("random codewords", 0.5))]
        found = {name: None for name in ["text", "long", "questions-4096", "decode", "times", *render.OTHERS]} | {"study-domains": {"length": 3072, "rows": rows}}
        made = render.blocks(found)
        self.assertIn("| random codewords | 10.0% | 0.5000 (0.2500 to 0.2500) | 0.5000 | 0.5000 |", made["study-domains"].replace("|  |", "|"))
        self.assertIsNone(made["study-lengths"])

    def test_words_that_a_document_no_longer_shows_stop_the_script(self):
        for name, say, method, index in (("study-pays", sentences.study_sentence, "wpq", "random codewords"), ("equal-time", sentences.equal_time_sentence, "", "`selfindex`")):
            document = documents.load(name)
            self.assertIn("`wpq`", say(document))
            for row in document["rows"]:
                if row["index"] == index and method in ("", row.get("method")):
                    row |= {"kl": 1e-6, "kl_by_block": [1e-6] * len(row["kl_by_block"])}
            with self.assertRaises(SystemExit, msg=name):
                say(document)

    def test_figures_in_the_notes_on_the_index_are_those_of_the_document(self):
        document = documents.load("index-search")
        errors = {row["index"]: [of and of for of in row["errors"]] for row in document["rows"]}
        page = " ".join((render.ROOT / "docs/dev/wpq-notes.md").read_text(encoding="utf-8").split())

        def at(index, share=1):
            return errors[index][share][0]

        half, best = "half of the directions, two stages", ", the best 4 B by both"
        pairs, more = "half, encoded by pairs of words" + best, "half, keys of 1.25 B positions, values of the best 0.75 B"
        self.assertIn(f"hardly changes the error ({at(pairs):.4f} and {at(half + best):.4f} at 10%", page)
        self.assertIn(f"give {at(more):.4f} instead of {at(half + best):.4f} at 10%", page)
        all_of = [of for of in errors.values() if of[1] and len(of[1]) == 3 and of[1][0] is not None]
        # Exact scores have no index.
        gains = [1 - of[1][1] / of[1][0] for index, of in errors.items() if of[1] and len(of[1]) == 3 and index != "exact"]
        self.assertIn("by up to 55% at 10%", page)
        self.assertTrue(0.5 < max(gains) < 0.55, gains)
        self.assertGreater(np.mean([of[1][2] > of[1][0] for of in all_of]), 0.8)
        plain, turned = "two stages without the metric" + best, "two stages, random rotation" + best
        usual = "16 words, 8 groups, two stages" + best
        ratios = [at(index, share) / at(usual, share) for index in (plain, turned) for share in (0, 1)]
        words = "without it, two stages have an error {:.1f} times as large at 5% and {:.1f} at 10%, with a random rotation instead of the principal directions {:.1f} and {:.1f}"
        self.assertIn(words.format(*ratios), page)
        two, one = "WRoPE, 256 words, two stages" + best, "WRoPE, 1,024 words"
        self.assertIn(f"an error of {at(two):.3f} instead of {at(one):.3f} at 10%, {at(two) / at(half + best):.0f} times that of `wpq`", page)

    def test_figures_in_the_page_on_methods_are_those_of_the_documents(self):
        page = (render.ROOT / "docs/methods.md").read_text(encoding="utf-8")

        def lost(name, share, method, options=""):
            [kl] = {row["kl"] for row in documents.load(name)["rows"] if (row["method"], row.get("options", ""), row["share"]) == (method, options, share) and "kl" in row}
            return kl

        def answered(name, method):
            return 100 * sentences.best_answer(documents.load(name), [method])["needle_accuracy"]

        best, buckets, few = "--pq-groups 4 --pq-bits 8", "--positions buckets --size 256", "--ds-channels 32"
        self.assertIn("({:.3f} and {:.3f} nats); with".format(lost("long", 0.1, "a2ats"), lost("long", 0.1, "streaming")), page)
        for words, name in (("little more than `pqcache` there", "long"), ("on [final text](results.md) more than twice as much", "final-long")):
            self.assertIn("{} ({:.3f} and {:.3f})".format(words, lost(name, 0.1, "a2ats", buckets), lost(name, 0.1, "pqcache", best)), page)
        self.assertGreater(lost("final-long", 0.1, "a2ats", buckets), 2 * lost("final-long", 0.1, "pqcache", best))
        self.assertIn("({:.3f} and {:.3f} nats at 3,072 tokens, {:.4f} and {:.4f} at 8,192)".format(
            lost("text", 0.1, "pqcache"), lost("text", 0.1, "wpq"), lost("long", 0.1, "pqcache", best), lost("long", 0.1, "wpq")), page)
        self.assertIn("({:.0f}%, `wpq` {:.0f}%; on final text as many as `wpq`: {:.1f}% and {:.1f}%)".format(
            *(answered(name, method) for name in ("questions-4096", "final-questions-4096") for method in ("pqcache", "wpq"))), page)
        self.assertIn("comes nearer ({:.4f}, `wpq` {:.4f})".format(lost("text", 0.2, "doublesparsity", few), lost("text", 0.2, "wpq")), page)

    def test_a_row_for_users_has_the_options_that_lose_least(self):
        rows = [{"method": method, "form": form, "options": options, "share": 0.1, "kl": kl, "kl_by_block": [kl] * 20, "bytes_read_fraction": 0.1, "bytes_moved_fraction": 0.12}
                for method, form, options, kl in (
                    ("quest", "", "", 0.3), ("quest", "tuned", "--page 64", 0.2), ("wpq", "", "", 0.05), ("wpq", "tuned", "--wpq-directions all", 0.04),
                    ("wpq", "mean", "--wpq-center mean", 0.01), ("lfps", "", "", 0.1), ("lfps", claims.BYPASS, claims.BYPASS, 0.4),
                    ("a2ats", "", "", 0.6), ("a2ats", "buckets, tuned", "--positions buckets --size 512", 0.5), ("a2ats", "searched: --size 256", "--size 256", 0.55))]
        chosen = tables.chosen_rows({"rows": rows}, 0.1)
        self.assertEqual([(row["kl"], usual["kl"]) for row, usual in chosen], [(0.05, 0.05), (0.1, 0.4), (0.2, 0.3), (0.5, 0.5), (0.55, 0.6)])
        text = tables.short_table({"rows": rows}, 0.1, None)
        self.assertIn("| `quest` (`--page 64`) | 10.0% | 12.0% | 0.2000 (0.2000 to 0.2000) | 0.3000 |", text)
        self.assertIn("| `wpq` | 10.0% | 12.0% | 0.0500 (0.0500 to 0.0500) |  |", text)
        # On final text, a row keeps the options that lose least on validation text, even if others lose less there.
        final = [row | {"kl": 0.25 if row["form"] == "tuned" else 0.15, "kl_by_block": [0.25 if row["form"] == "tuned" else 0.15] * 20} for row in rows if row["method"] != "lfps"]
        text = tables.short_table({"rows": rows}, 0.1, {"rows": final})
        self.assertIn("| `quest` (`--page 64`) | 10.0% | 12.0% | 0.2000 (0.2000 to 0.2000) | 0.3000 | 0.2500 (0.2500 to 0.2500) |", text)
        self.assertIn("| `lfps` | 10.0% | 12.0% | 0.1000 (0.1000 to 0.1000) | 0.4000 |  |", text)

    def test_an_artifact_that_was_fitted_to_a_final_work_is_refused(self):
        fitted = {"handbook": 8, "uuid": 1}
        head = {"calibration": {"main": {"fitted": fitted}}}
        final = {"final-text": head | {"table": "final-text", "works": ["prose"]}, "final-questions-4096": head | {"table": "final-questions-4096", "haystack": "prose-final"}}
        self.assertIsNone(sentences.final_of(final, "questions-8192"))
        for name in ("text", "questions-4096"):
            self.assertIs(sentences.final_of(final, name), final[f"final-{name}"])
        fitted["prose"] = 1
        for name in ("text", "questions-4096"):
            with self.assertRaises(SystemExit):
                sentences.final_of(final, name)

    def test_questions_for_users_are_of_the_options_that_answer_most(self):
        rows = [{"method": method, "form": form, "options": options, "share": 0.1, "bytes_read_fraction": 0.1, "needle_accuracy": right, "scores_by_line": [[right]] * 20}
                for method, form, options, right in (("quest", "", "", 0.2), ("quest", "tuned", "--page 64", 0.3), ("wpq", "", "", 0.6), ("wpq", "all directions", "--wpq-directions all", 0.7))]
        lines = tables.short_questions({"rows": rows}, None).splitlines()
        self.assertEqual(lines[2:], ["| `wpq` | 10.0% | 60.0% (60.0 to 60.0) |", "| `quest` (`--page 64`) | 10.0% | 30.0% (30.0 to 30.0) |"])
        final = [row | {"needle_accuracy": 0.5, "scores_by_line": [[0.5]] * 20} for row in rows[1:]]
        lines = tables.short_questions({"rows": rows}, {"rows": final}).splitlines()
        self.assertEqual(lines[2:], ["| `wpq` | 10.0% | 60.0% (60.0 to 60.0) | 50.0% (50.0 to 50.0) |", "| `quest` (`--page 64`) | 10.0% | 30.0% (30.0 to 30.0) | 50.0% (50.0 to 50.0) |"])

    def test_speeds_stand_beside_losses(self):
        row = {"model": "smollm2-135m", "weights": "bf16", "cache": "bf16", "context": 8192, "rounds": [19.0, 21.0, 20.0], "tokens_per_s": 20.0}
        rows = [row | {"program": "kvsmith", "method": "full"}, row | {"program": "kvsmith", "method": "wpq", "bytes_read_fraction": 0.1, "share": 0.1, "budget": 0.07, "table": "long"},
                row | {"program": "kvsmith", "method": "lfps", "bytes_read_fraction": 0.3, "share": 0.1, "budget": 0.3, "table": "long"},
                row | {"program": "llama.cpp", "method": "full", "cache": "f16"}]
        losses = [{"method": method, "form": "", "share": 0.1, "budget": budget, "kl": kl} for method, budget, kl in (("wpq", [0.06, 0.08], 0.0027), ("lfps", 0.3, 0.017))]
        document = {"rows": rows, "runs": [{"models": ["smollm2-135m"], "machine": "A", "program": "kvsmith", "rounds": 3}]}
        text = tables.decode_table(document, {"long": {"rows": losses}})
        # lfps reads another share on random rows; a table that was measured anew has other budgets.
        self.assertIn("| `lfps` | 30.0% |  | 20.0", text)
        losses[0]["budget"] = 0.05
        self.assertIn("| `wpq` | 10.0% |  | 20.0", tables.decode_table(document, {"long": {"rows": losses}}))
        self.assertIn("| smollm2-135m | bf16 | 8,192 | `full` | 100% | 0 | 20.0 (19.0 to 21.0) |", text)
        self.assertIn("| smollm2-135m | bf16 | 8,192 | `wpq` | 10.0% | 0.0027 | 20.0 (19.0 to 21.0) |", text)
        self.assertIn("| smollm2-135m | bf16 | 8,192 | llama.cpp, cache in f16 | 100% |  | 20.0 (19.0 to 21.0) |", text)

    def test_formats_stand_beside_their_bits(self):
        row = {"method": "full", "budget": 0.06, "kl": 0.01, "kl_by_block": [0.01] * 20, "kl_p99": 0.1, "top1_equal": 0.9}
        document = {"length": 2048, "works": ["handbook"] * 20, "blocks": 20, "steps": 640, "rows": [row | {"kv": kv, "maps": "balanced"} for kv in ("int8", "k=int4,v=int2", "2bit")]}
        bits = [[cell.strip() for cell in line.split("|")[1:5]] for line in tables.format_table(document).splitlines()[4:]]
        self.assertEqual(bits, [["`int8`", "", "8.25", "8.25"], ["`k=int4,v=int2`", "fitted", "3.5", "3.915"], ["`2bit`", "", "3.5", "3.891"]])

    def test_losses_of_formats_are_as_the_page_says(self):
        rows = {(row["kv"], row["maps"]): row for row in documents.load("row-formats")["rows"]}
        results.require_apart(documents.load("row-formats")["calibration"], "handbook")
        ratio = rows["int4", "balanced"]["kl"] / rows["int4", "hadamard"]["kl"]
        self.assertLess(ratio, 0.5)
        for kv, times in (("int4", 0.6), ("int2", 0.4)):
            self.assertAlmostEqual(rows[kv, "balanced"]["kl"] / rows[kv, "orthogonal"]["kl"], times, delta=0.05)
        self.assertGreater(rows["2bit", "hadamard"]["kl"] / rows["int2", "balanced"]["kl"], 5)
        self.assertEqual(round(rows["k=int4,v=int2", "balanced"]["kl"], 4), 0.0056)
        self.assertLess(tables.kl_interval(rows["int2", "balanced"])[1], tables.kl_interval(rows["2bit", "hadamard"])[0])

    def test_losses_together_stand_beside_their_sum(self):
        losses = {("full", "bf16"): 0, ("wpq", "bf16"): 0.01, ("full", "int4"): 0.002, ("wpq", "int4"): 0.018}
        rows = [{"method": method, "kv": kv, "budget": 0.05, "kl": kl, "kl_by_block": [kl] * 20} for (method, kv), kl in losses.items()]
        text = tables.sums_table({"length": 2048, "works": ["handbook"] * 20, "blocks": 20, "steps": 320, "rows": rows})
        self.assertIn("| `int4` | 0.0020 | 0.0100 | 0.0120 | 0.0180 (0.0180 to 0.0180) | 1.50 (1.50 to 1.50) |", text)
        self.assertEqual(len(text.splitlines()), 5)

    def test_losses_add_up_as_the_page_says(self):
        document = documents.load("row-sums")
        results.require_apart(document["calibration"], "handbook")
        of = {(row["method"], row["kv"]): row["kl_by_block"] for row in document["rows"]}
        for kv in ("int4", "int2"):
            apart = [a + b for a, b in zip(of["wpq", "bf16"], of["full", kv])]
            least, most = tables.ratio_interval(of["wpq", kv], apart)
            self.assertTrue(0.85 < least < 1 < most < 1.15, kv)

    def test_rows_of_formats_stand_beside_those_in_bf16_at_5_percent(self):
        rows = [{"method": method, "form": form, "share": share, "budget": 0.02, "uncompressed_moved_fraction": share, "kl": kl, "kl_by_block": [kl] * 20}
                for form, factor in (("bf16", 1), ("int4", 0.5)) for method, share, kl in (("full", 1, 0.001 * factor), ("wpq", 0.05, 0.01 * factor))]
        rows.append({"method": "wpq", "form": "bf16", "share": 0.025, "budget": None, "least": 0.03})
        text = tables.reads_table({"length": 8192, "works": ["handbook"] * 9 + ["python"] * 11, "blocks": 20, "steps": 320, "rows": rows})
        self.assertIn("20 blocks of 8,192 tokens (handbook, python), 320 steps.", text)
        beside = [[cell.strip() for cell in line.split("|")[1:-1]][-1] for line in text.splitlines()[4:]]
        self.assertEqual(beside, ["", "", "", "", "0.50 (0.50 to 0.50)"])
        self.assertIn("| `wpq` | `bf16` | at least 3.0% |", text)
        plan = rows[3] | {"method": "plan", "form": "per KV head", "budget": "per KV head", "kl": 0.004, "kl_by_block": [0.004] * 20}
        text = tables.reads_table({"length": 8192, "works": ["handbook"] * 20, "blocks": 20, "steps": 320, "rows": [*rows, plan]})
        self.assertIn("| `plan` | per KV head | 5.0% | 0.00400 (0.00400 to 0.00400) | 0.40 (0.40 to 0.40) |", text)
        self.assertIn("At 5.0%, the plan loses 0.80 (0.80 to 0.80) times as much as `wpq` over `int4`.", text)

    def test_maps_stand_beside_the_hadamard_rotation(self):
        rows = [{"rows": "keys", "bits": bits, "map": name, "errors": errors} for bits, name, errors in (
            (4, "hadamard", [0.1, 0.4]), (4, "balanced, clip 0.97", [0.05, 0.05]), (2, "hadamard", [1, 1]), (2, "balanced, clip 0.8", [0.5, 0.5]))]
        lines = tables.map_table({"rows": rows}).splitlines()[2:]
        self.assertEqual(lines, ["| keys | hadamard | 0.25000 (1.00) | 1.00000 (1.00) |", "| keys | balanced, clipped | 0.05000 (0.25) | 0.50000 (0.50) |"])

    def test_errors_of_maps_are_as_the_page_says(self):
        document = documents.load("row-maps")
        self.assertEqual({kind for fit in document["calibration"].values() for kind, tokens in fit["fitted"].items() if tokens}, {"python", "uuid"})
        errors = {(row["rows"], row["bits"], row["map"]): np.array(row["errors"]) for row in document["rows"]}

        def ratio(rows, bits, name):
            return np.exp(np.log(errors[rows, bits, name] / errors[rows, bits, "hadamard"]).mean())

        self.assertAlmostEqual(ratio("keys", 2, "hadamard, mean, clip 0.8"), 1 / 3, delta=0.02)
        self.assertAlmostEqual(ratio("keys", 2, "balanced, clip 0.8"), 1 / 8, delta=0.02)
        self.assertLess(ratio("keys", 4, "balanced"), 0.75 * ratio("keys", 4, "hadamard, mean, clip 0.97"))
        self.assertGreater(ratio("keys", 4, "hadamard, clip 0.97"), 1)
        self.assertLess(errors["keys", 4, "hadamard, clip 0.97"].mean(), errors["keys", 4, "hadamard"].mean())
        self.assertLess(ratio("keys", 2, "kivi"), ratio("keys", 2, "balanced, clip 0.8"))
        for bits in (4, 2):
            self.assertLess(ratio("values", bits, "attended"), 0.5)

    def test_times_of_formats_are_medians_with_their_range(self):
        rows = [{"kv": "bf16", "ms": {"full": [30, 10, 20], "wpq": [4, 4, 7]}}]
        document = {"model": "m", "context": 8192, "budget": 0.06, "rounds": 3, "program": "p", "machine": "c", "rows": rows}
        cells = [cell.strip() for cell in tables.format_time_table(document).splitlines()[-1].split("|")[1:-1]]
        self.assertEqual(cells, ["`bf16`", "20.0 (10.0 to 30.0)", "4.0 (4.0 to 7.0)"])

    def test_times_of_formats_are_as_the_page_says(self):
        ms = {row["kv"]: {method: np.median(of) for method, of in row["ms"].items()} for row in documents.load("row-format-times")["rows"]}
        ratios = [ms[kv]["full"] / ms["bf16"]["full"] for kv in ("k=int8,v=int4", "int4", "k=int4,v=int2", "int2", "2bit")]
        self.assertEqual([round(min(ratios), 2), round(max(ratios), 2)], [1.06, 1.11])
        self.assertTrue(all(abs(of["wpq"] / ms["bf16"]["wpq"] - 1) < 0.06 for of in ms.values()))

    def test_aims_compare_the_rows_that_they_name(self):
        row = {"program": "kvsmith", "model": "smollm2-135m", "weights": "bf16", "context": 8192, "method": "full", "tokens_per_s": 60.0}
        rows = [row, row | {"method": "wpq", "share": 0.05, "tokens_per_s": 84.0}, row | {"method": "wpq", "share": 0.1, "tokens_per_s": 59.0},
                row | {"method": "streaming", "share": 0.05, "tokens_per_s": 100.0}, row | {"program": "llama.cpp", "tokens_per_s": 40.0},
                row | {"program": "llama.cpp", "tokens_per_s": 50.0}, row | {"program": "transformers", "tokens_per_s": 90.0}]
        lines = tables.decode_aims({"rows": rows}).splitlines()[2:]
        met = [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines]
        self.assertEqual(met, [["8,192", "60.0 / 50.0", "1.20", "1.2", "yes"], ["8,192, 5%", "84.0 / 60.0", "1.40", "1.4", "yes"],
                               ["8,192, 5%", "84.0 / 100.0", "0.84", "0.9", "no"], ["8,192, 10%", "59.0 / 60.0", "0.98", "1.0", "no"]])
        self.assertIn("the least of 2 ratios: smollm2-135m, bf16", lines[-1])

    def test_pictures_show_what_was_measured(self):
        rows = [{"method": method, "form": "", "share": share, "kl": kl, "kl_by_block": [kl] * 20, "bytes_read_fraction": share}
                for method, kl in (("wpq", 0.01), ("streaming", 0.1)) for share in (0.1, 0.2)]
        made = pictures.drawn({"decode": None}, {"length": 3072, "text": "validation", "steps": 480, "rows": rows})
        self.assertEqual(sorted(made), ["loss-dark.svg", "loss-light.svg"])
        self.assertIn(">streaming<", made["loss-light.svg"])
        self.assertNotIn(">quest<", made["loss-light.svg"])

    def test_speeds_are_compared_at_equal_bytes(self):
        row = {"model": "smollm2-135m", "weights": "bf16", "program": "kvsmith", "rounds": [1.0], "table": "long"}
        rows = [row | {"context": n, "method": method, "share": share, "bytes_read_fraction": share, "budget": share, "tokens_per_s": rate}
                for n, method, share, rate in ((3072, "full", None, 30.0), (8192, "full", None, 20.0), (8192, "wpq", 0.05, 40.0), (8192, "wpq", 0.1, 25.0))]
        document = {"rows": rows, "runs": [{"models": ["smollm2-135m"], "machine": "A, 2 threads, avx2", "program": "kvsmith", "rounds": 1}]}
        self.assertIn("SmolLM2-135M on A, 2 threads, 8,192 positions, tokens per second: full attention 20; at 10% of the bytes `wpq` 25 (1.2 times).", sentences.speed_sentence(document, {}))
        losses = {"long": {"rows": [{"method": "wpq", "form": "", "share": 0.1, "budget": 0.1, "kl": 0.0027}]}}
        self.assertIn("`wpq` 25 (1.2 times, KL 0.0027).", sentences.speed_sentence(document, losses))
        # A peer's full attention is not ours.
        shape = {"program": "kvsmith", "model": "qwen3-0.6b", "weights": "bf16", "context": 32768, "rounds": [1.0], "method": "full", "tokens_per_s": 5.0}
        more = [shape, *(shape | {"method": method, "bytes_read_fraction": 0.07, "tokens_per_s": 12.5} for method in ("wpq", "selfindex")),
                shape | {"program": "llama.cpp", "tokens_per_s": 2.5}]
        runs = [*document["runs"], document["runs"][0] | {"models": ["qwen3-0.6b"]}]
        self.assertIn("2.5 times with `wpq` (reading 7%)", sentences.speed_sentence({"rows": rows + more, "runs": runs}, {}))
        drawn = pictures.speeds(document, pictures.THEMES["light"])
        # Two marks of full attention, and the one of wpq at this share.
        self.assertIn(">wpq<", drawn)
        self.assertEqual(drawn.count("<circle"), 3)

    def test_a_picture_holds_the_digest_of_its_data_once(self):
        png = picture_data.SIGNATURE
        for name, of in ((b"IHDR", bytes(13)), (b"IEND", b"")):
            png += struct.pack(">I", len(of)) + name + of + struct.pack(">I", zlib.crc32(name + of))
        twice = picture_data.marked(picture_data.marked(png, "a" * 64), "b" * 64)
        held = [of for kind, of in picture_data.chunks(twice) if kind == b"tEXt"]
        self.assertEqual(held, [b"kvsmith-report\0" + b"b" * 64])

    def test_a_table_of_a_work_that_was_fitted_stops_the_script(self):
        def table(fitted, name="for-python"):
            return {"table": "text", "works": ["python"], "calibration": {name: {"fitted": {fitted: 10}}}}

        sentences.require_other_works(table("handbook"))
        for document in (table("python"), table("handbook", "main")):
            with self.assertRaises(SystemExit):
                sentences.require_other_works(document)

    def test_answers_on_final_text_are_told_apart_by_their_paired_differences(self):
        def row(method, right, lines):
            return {"method": method, "form": "", "options": "", "share": 0.1, "needle_accuracy": right, "scores_by_line": lines}

        def said(theirs):
            losses = [{"method": method, "form": "", "options": "", "share": share, "kl": kl, "kl_by_block": [kl] * 20} for method, kl in (("wpq", 0.1), ("quest", 0.2)) for share in (0.1, 0.2)]
            head = {"length": 8, "calibration": {"main": {"fitted": {"handbook": 8}}}}
            asked = {"questions": 20, "full_needle_accuracy": 0.5, "haystack": "prose-final", "table": "final-questions-4096",
                     "rows": [row("wpq", 0.5, [[0], [1]] * 10), row("quest", 0.2, theirs)]}
            return sentences.final_summary({"final-text": head | {"table": "final-text", "works": ["prose"], "rows": losses},
                                         "final-long": head | {"table": "final-long", "works": ["prose"], "rows": losses}, "final-questions-4096": head | asked})

        self.assertTrue(said([[0], [1]] * 10).endswith(": the two are not told apart."))
        self.assertTrue(said([[0], [0]] * 10).endswith(": the two differ."))

    def test_our_form_of_a2ats_is_not_a_published_method(self):
        rows = [{"method": "a2ats", "form": form, "options": "", "share": 0.1, "kl": kl, "kl_by_block": [kl]} for form, kl in (("", 0.5), ("buckets", 0.1))]
        self.assertEqual(tables.best_of_papers({"rows": rows}, 0.1)["form"], "")

    def test_a_row_that_was_not_measured_says_why(self):
        document = {"rows": [{"method": "quest", "form": "", "share": 0.05, "budget": None, "least": 0.07}],
                    "missing": [{"method": "pqcache", "why": "this program does not have it"}]}
        text = tables.text_table(document)
        self.assertIn("at least 7.0%", text)
        self.assertIn("`pqcache`, because this program does not have it", text)


class Prompts(unittest.TestCase):
    def test_a_prompt_is_compared_with_the_faster_type_of_the_peer(self):
        seconds = {("kvsmith", "f32"): 4.0, ("kvsmith", "bf16"): 2.0, ("PyTorch", "f32"): 5.0, ("PyTorch", "bf16"): 1.8}
        rows = [{"program": program, "precision": precision, "part": part, "tokens": 512, "threads": threads, "seconds": time / threads + (part == "attention" and program == "PyTorch") * 2}
                for (program, precision), time in seconds.items() for part in ("projections", "attention") for threads in (1, 2)]
        said = sentences.prompts_sentence({"machine": "Some CPU, 2 threads, avx2", "rows": rows})
        self.assertIn("on Some CPU (a layer of Llama-3.1-8B, 512 tokens, 1 and 2 threads), f32 takes 2.0 times as long in projections and 2.0 in attention", said)
        self.assertIn("PyTorch (its faster type) 0.9 and 1.9 to 2.9", said)


class Reference(unittest.TestCase):
    def test_figures_of_the_gpu_are_in_its_tables(self):
        page = (render.ROOT / "docs/performance.md").read_text(encoding="utf-8")
        measured = (render.ROOT / "docs/dev/gpu.md").read_text(encoding="utf-8")
        bullets = page.split("On an H200, with random bf16 weights", 1)[1].split("\n## ", 1)[0]
        ratios = re.findall(r"(?<![\d.])\d\.\d\d(?!\d)", bullets)
        self.assertGreaterEqual(len(ratios), 6)
        rows = re.findall(r"^\| ([\d,]+ \| \d) \| `(\w+)` \| [^|]* \| [^|]* \| ([\d.]+) \| \d+ \| ([\d.]+) \|$", measured, re.MULTILINE)
        full = {at: float(step) for at, method, step, _ in rows if method == "full"}
        faster = {ratio for *_, ratio in rows}
        longer = {f"{float(step) / full[at]:.2f}" for at, _, step, _ in rows}
        for ratio in ratios:
            self.assertIn(ratio, faster | longer)
        for rate in re.findall(r"(\d+) tokens/s", bullets):
            self.assertIn(f"| {rate} |", measured)
        # README says the same of 8,192 and 131,072 positions of one sequence.
        steps = {(at, method): float(step) for at, method, step, _ in rows}
        short, long = ({method: full[at] / steps[at, method] for method in ("wpq", "selfindex", "a2ats")} for at in ("8,192 | 1", "131,072 | 1"))
        self.assertLess(max(short.values()), 1)
        said = f"slower than full attention at 8K, and {long['wpq']:.1f} (`wpq`) to {max(long.values()):.1f} times as fast at 128K"
        self.assertIn(said, (render.ROOT / "README.md").read_text(encoding="utf-8"))

    def test_the_schema_describes_the_examples(self):
        import jsonschema

        page = render.JSON_PAGE.read_text(encoding="utf-8")
        schema = json.loads(json_schema.schema(page))
        jsonschema.Draft202012Validator.check_schema(schema)
        validator = jsonschema.Draft202012Validator(schema)
        text, examples = page.split("```json\n")[1].split("```")[0].strip(), []
        while text:
            example, end = json.JSONDecoder().raw_decode(text)
            # The page leaves out some keys.
            examples.append(example | {"schema": 1, "version": "0.1.0"})
            text = text[end:].strip()
        self.assertGreaterEqual(len(examples), 8)
        for example in examples:
            validator.validate(example)
        wrong = {"command": "eval", "schema": 1, "version": "0.1.0", "rows": [{"method": 1}]}
        self.assertFalse(validator.is_valid(wrong))
        self.assertTrue(validator.is_valid(wrong | {"rows": [{"method": "wpq", "kl": None}]}))
        self.assertFalse(validator.is_valid({"command": "run"}))


if __name__ == "__main__":
    unittest.main()
