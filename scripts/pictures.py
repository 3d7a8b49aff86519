"""Pictures of README.md and docs/results.md, from the documents in docs/results: loss against bytes, and tokens per second against the length of the context.

Each is drawn for a light and a dark page. render.py writes them.
"""

import math
from html import escape

import tables

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 44, 48
# Ink, faint ink, and the colours of lines, for a light and a dark page.
THEMES = {
    "light": {"ink": "#1f2328", "faint": "#d0d7de", "ours": "#0969da", "exact": "#1f2328",
              "others": ("#bc4c00", "#1a7f37", "#8250df", "#9a6700", "#cf222e", "#57606a", "#116329", "#953800")},
    "dark": {"ink": "#e6edf3", "faint": "#30363d", "ours": "#58a6ff", "exact": "#e6edf3",
             "others": ("#ffa657", "#56d364", "#d2a8ff", "#e3b341", "#ff7b72", "#8b949e", "#7ee787", "#f0883e")},
}
# What the picture of losses shows: method, form, and its name.
LOSSES = (("topk", "", "exact top-k (oracle)"), ("wpq", "", "wpq"), ("pqcache", "", "pqcache"), ("a2ats", "buckets", "a2ats, buckets"), ("doublesparsity", "", "doublesparsity"),
          ("lfps", "", "lfps"), ("selfindex", "", "selfindex"), ("quest", "", "quest"), ("snapkv", "", "snapkv"), ("streaming", "", "streaming"))
# The model whose losses are known.
REAL = "smollm2-135m"
# Models with random weights that docs/performance.md shows.
DRAWN = {"llama-3.2-1b": 131_072, "qwen3-4b": 32_768}
# What the picture of speeds shows, at this share of the bytes or nearest to it.
SPEEDS = (("full", "full attention"), ("wpq", "wpq"), ("selfindex", "selfindex"), ("streaming", "streaming"))
SHARE = 0.1


class Plot:
    """A chart of lines with labels at their right ends."""

    def __init__(self, theme, title, about, x, y):
        self.theme, self.parts, self.x, self.y, self.labels = theme, [], x, y, []
        self.text(LEFT - 48, 18, title, size=15, weight=600)
        self.text(LEFT - 48, 34, about, size=11)

    def text(self, x, y, words, size=12, anchor="start", fill=None, weight=400):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill or self.theme["ink"]}">{escape(words)}</text>')

    def line(self, points, colour, width, dash=""):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>')

    def axes(self, x_ticks, y_ticks, x_name, y_name):
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        for value, words in y_ticks:
            self.line([(LEFT, self.y(value)), (right, self.y(value))], self.theme["faint"], 1)
            self.text(LEFT - 6, self.y(value) + 4, words, anchor="end", size=11)
        for value, words in x_ticks:
            self.line([(self.x(value), bottom), (self.x(value), bottom + 5)], self.theme["ink"], 1)
            self.text(self.x(value), bottom + 18, words, anchor="middle", size=11)
        self.line([(LEFT, bottom), (right, bottom)], self.theme["ink"], 1)
        self.text((LEFT + right) / 2, bottom + 36, x_name, anchor="middle")
        self.text(LEFT - 48, TOP + 6, y_name, size=11)

    def series(self, points, name, colour, bold=False, dash="", spread=()):
        at = [(self.x(x), self.y(y)) for x, y in points]
        # Intervals at the same place stand side by side.
        beside = 3 * (len(self.labels) % 5 - 2)
        for (x, _), ends in zip(at, spread):
            if ends:
                self.line([(x + beside, self.y(ends[0])), (x + beside, self.y(ends[1]))], colour, 1.2)
        self.line(at, colour, 3 if bold else 1.6, dash)
        self.parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{4 if bold else 2.8}" fill="{colour}"/>' for x, y in at]
        self.labels.append([at[-1][1], at[-1][0], name, colour, bold])

    def svg(self):
        # Labels that would overlap move down.
        low = -math.inf
        for end, x, name, colour, bold in sorted(self.labels):
            low = max(end, low + 14)
            self.line([(x + 6, end), (WIDTH - RIGHT + 8, low)], colour, 0.5)
            self.text(WIDTH - RIGHT + 12, low + 4, name, fill=colour, weight=600 if bold else 400)
        body = "\n".join(self.parts)
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
                f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n{body}\n</svg>\n')


def scale(low, high, first, last, log=True):
    """Return a function from values to pixels."""
    to = math.log if log else float
    width = to(high) - to(low)
    return lambda value: first + ((to(value) - to(low)) / width if width else 0.5) * (last - first)


def losses(document, theme):
    """Draw the losses of some methods against the shares of the bytes that they read; each point has the options that lose least there."""
    chosen = [row for share in tables.shares_of(document) for row, _ in tables.chosen_rows(document, share)]
    found = []
    for method, form, name in LOSSES:
        rows = [row for row in chosen if (row["method"], tables.is_buckets(row)) == (method, form == "buckets")]
        if rows:
            found.append((name, sorted(rows, key=lambda row: row["bytes_read_fraction"])))
    spreads = {name: [tables.kl_interval(row) for row in rows] for name, rows in found}
    values = [value for name, rows in found for row, ends in zip(rows, spreads[name]) for value in (row["kl"], *(ends or ()))]
    low, high = 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values)))
    reads = [row["bytes_read_fraction"] for _, rows in found for row in rows]
    right = math.ceil(100 * max(reads) + 0.5) / 100
    plot = Plot(theme, "Loss against bytes read", f"SmolLM2-135M, {document['length']:,} tokens of {document['text']} text, {document['steps']} steps; best options of each method; 95% intervals",
                scale(0, right, LEFT, WIDTH - RIGHT, log=False), scale(low, high, HEIGHT - BOTTOM, TOP + 16))
    ticks = [value for power in range(round(math.log10(low)), round(math.log10(high)) + 1) for value in (10**power, 3 * 10**power) if low <= value <= high]
    plot.axes([(share / 100, f"{share}%") for share in range(0, round(100 * right) + 1, 2)], [(value, f"{value:g}") for value in ticks],
              "bytes of the KV cache that a step reads, index included", "KL from full attention, nats")
    others = iter(theme["others"])
    for name, rows in found:
        ours, exact = name == "wpq", name.startswith("exact")
        colour = theme["ours"] if ours else theme["exact"] if exact else next(others)
        plot.series([(row["bytes_read_fraction"], row["kl"]) for row in rows], name, colour, bold=ours, dash=' stroke-dasharray="5 4"' if exact else "", spread=spreads[name])
    return plot.svg()


def at_equal_bytes(document):
    """Return the rows of the real model in bf16: those of full attention, and those at a share of the bytes whose losses are known."""
    rows = [row for row in document["rows"] if (row["model"], row["weights"], row["program"]) == (REAL, "bf16", "kvsmith")]
    return [row for row in rows if row["method"] == "full" or row["share"] == SHARE]


def usual(row):
    """Tell whether docs/performance.md shows a row of decode.json: of the real model at a share of the bytes, or of a drawn one with a large cache."""
    is_ours = row["program"] == "kvsmith"
    if row["model"] == REAL:
        if row["context"] < 4096 or row["weights"] != "bf16":
            return False
        return row["method"] in dict(SPEEDS) and (row["method"] == "full" or row["share"] == SHARE) if is_ours else row["cache"] in ("f16", "bf16")
    if row["context"] != DRAWN.get(row["model"]) or row["weights"] != "q8":
        return False
    return row["method"] in ("full", "wpq", "selfindex") if is_ours else row["cache"] == "f16"


def of_peer(document):
    """Return the rows of llama.cpp with the real model in bf16."""
    rows = [row for row in document["rows"] if row["program"] == "llama.cpp" and row["model"] == REAL]
    return [row for row in rows if (row["weights"], row["cache"]) == ("bf16", "f16")]


def speeds(document, theme):
    """Draw tokens per second against the length of the context, at the settings whose losses are known."""
    rows = at_equal_bytes(document)
    contexts = sorted({row["context"] for row in rows})
    top = 10 * math.ceil(max(row["tokens_per_s"] for row in rows) / 10)
    machine = next(run["machine"] for run in document["runs"] if REAL in run["models"])
    plot = Plot(theme, "Tokens per second", f"SmolLM2-135M in bf16, one sequence, {100 * SHARE:.0f}% of the bytes of the cache; {machine.split(',')[0]}, {machine.split(',')[1].strip()}",
                scale(contexts[0], contexts[-1], LEFT + 10, WIDTH - RIGHT - 10), scale(0, top, HEIGHT - BOTTOM, TOP + 16, log=False))
    plot.axes([(context, f"{context:,}") for context in contexts], [(value, str(value)) for value in range(0, top + 1, max(10, top // 50 * 10))],
              "positions in the cache", "tokens per second")
    others = iter(theme["others"])
    for method, name in SPEEDS:
        points = sorted((row["context"], row["tokens_per_s"]) for row in rows if row["method"] == method)
        if points:
            colour = theme["ours"] if method == "wpq" else theme["exact"] if method == "full" else next(others)
            plot.series(points, name, colour, bold=method == "wpq", dash=' stroke-dasharray="5 4"' if method == "full" else "")
    points = sorted((row["context"], row["tokens_per_s"]) for row in of_peer(document))
    if points:
        plot.series(points, "llama.cpp, full attention", next(others), dash=' stroke-dasharray="2 3"')
    return plot.svg()


def drawn(found, headline):
    """Return the pictures by their names, that of losses of the table `headline`; those of missing documents are left out."""
    made = {}
    for theme, colours in THEMES.items():
        if headline:
            made[f"loss-{theme}.svg"] = losses(headline, colours)
        if found["decode"]:
            made[f"speed-{theme}.svg"] = speeds(found["decode"], colours)
    return made
