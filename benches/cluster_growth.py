#!/usr/bin/env python3
"""Simulate a sharded calibration on up to 1,000 machines with one shared disk.

Prints a table per model: the time of both job arrays, the bytes read and written, and where the machine time goes. The
bytes are those of `kvsmith plan --shards`; rates, stragglers and failures are assumptions, each of which is an option.
Needs only Python; the same seed gives the same tables. Example: python3 benches/cluster_growth.py --disk 100
"""

import argparse
import heapq
import math
import random

# name: layers, hidden channels, channels of the MLP, query heads; each with 8 KV heads of 128 channels.
MODELS = {
    "8B": (32, 4096, 14336, 32),
    "70B": (80, 8192, 28672, 64),
    "405B": (126, 16384, 53248, 128),
}
KV_HEADS, DIM, VOCABULARY, SECTIONS = 8, 128, 128_256, 5
COUNTS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]
# Reading and computing alternate this many times in a task.
SLICES = 8
# Machine time that is not work, in the order in which tables name it.
LOSSES = ["digests", "disk", "opening files", "failures", "waiting"]


class Model:
    """The work and the bytes of a calibration, as `kvsmith plan --shards` counts them."""

    def __init__(self, shape, blocks, block, options):
        self.layers, hidden, inner, self.heads = shape
        self.blocks, self.block, self.options = blocks, block, options
        q, kv = self.heads * DIM, KV_HEADS * DIM
        layer = hidden * (2 * q + 2 * kv + 3 * inner)
        # A pass over the text reads all weights but the output head, in bf16.
        self.weights = 2 * (self.layers * layer + VOCABULARY * hidden)
        attention = 4 * q * block / 2
        self.flops = self.layers * (2 * layer + attention)
        self.sum = KV_HEADS * DIM * DIM * 8
        self.block_sums = 2 * self.sum + 8 * KV_HEADS
        self.row = DIM * options.dtype
        state = KV_HEADS * (4096 * DIM * 2 + 4096 * 4 + 3 * DIM * DIM * 4) + self.heads * 2800
        self.artifact = self.layers * state

    def rows(self, heads, blocks):
        """Return the bytes of the states of some heads of a layer."""
        return heads * blocks * self.block * self.row

    def folder(self, blocks):
        """Return the bytes of the folder of a token shard."""
        layer = self.rows(self.heads + 2 * KV_HEADS, blocks) + blocks * self.block_sums
        return self.layers * (layer + 3 * self.sum) + 9 * blocks * self.block

    def token_task(self, blocks):
        """Return (work, digests, opens, bytes read, bytes written) of a token shard; the first two in seconds."""
        written = self.folder(blocks)
        work = blocks * self.block * self.flops / (1e12 * self.options.tflops)
        return work, written / (1e9 * self.options.digest), self.layers, self.weights + written, written

    def fits(self, layers):
        """Return the seconds that the fits of some layers take."""
        tokens = self.blocks * self.block / 1e7
        return 60 * layers * KV_HEADS * tokens * self.options.fit_minutes

    def layer_task(self, layers, shards):
        """Return the same for a range of layers, whose states are in so many shards."""
        file = self.rows(self.heads + 2 * KV_HEADS, self.blocks) + self.blocks * self.block_sums
        digested = SECTIONS * (layers * file + 9 * self.blocks * self.block)
        # Keys 10 times, values once, queries twice, sums twice.
        heads = 11 * KV_HEADS + 2 * self.heads
        picked = layers * (self.rows(heads, self.blocks) + 2 * self.blocks * self.block_sums)
        # Every section command opens one file of each shard, to check its shapes, and those of its own layers.
        opens = SECTIONS * shards * (1 + layers)
        written = self.artifact * layers // self.layers
        read = digested + picked + written
        return self.fits(layers), digested / (1e9 * self.options.digest), opens, read, written


class Disk:
    """A shared disk whose bandwidth the tasks that use it divide equally, up to a limit for each."""

    def __init__(self, total, client):
        self.total, self.client = total, client
        self.now = self.served = 0.0
        self.users = {}
        self.ends = []

    def rate(self):
        return min(self.client, self.total / max(1, len(self.users)))

    def advance(self, now):
        self.served += (now - self.now) * self.rate()
        self.now = now

    def add(self, task, size):
        self.users[task] = self.served + size
        heapq.heappush(self.ends, (self.users[task], task))

    def first(self):
        """Return when the next task is served, and which one it is."""
        while self.ends and self.users.get(self.ends[0][1]) != self.ends[0][0]:
            heapq.heappop(self.ends)
        if not self.ends:
            return math.inf, None
        end, task = self.ends[0]
        return self.now + max(0.0, end - self.served) / self.rate(), task


class Array:
    """A job array on some machines: tasks (seconds of computing, bytes), which wait in a queue."""

    def __init__(self, tasks, machines, options, rng):
        self.tasks, self.machines, self.options, self.rng = tasks, machines, options, rng
        self.disk = Disk(1e9 * options.disk, 1e9 * options.client)
        self.slow = [rng.lognormvariate(0, options.sigma) for _ in tasks]
        self.now, self.queue, self.events = 0.0, list(range(len(tasks)))[::-1], []
        # When each running task started, and its slices that are left; how often each task was tried.
        self.started, self.left, self.tries = {}, {}, [0] * len(tasks)
        self.on_disk = self.failed = 0.0

    def at(self, seconds, what, task):
        heapq.heappush(self.events, (self.now + seconds, what, task, self.tries[task]))

    def seconds(self, task):
        """Return how long the task computes, on its machine."""
        return self.tasks[task][0] * self.slow[task]

    def start(self):
        while self.queue and len(self.started) < self.machines:
            task = self.queue.pop()
            self.tries[task] += 1
            self.started[task], self.left[task] = self.now, SLICES
            self.at(self.rng.expovariate(1 / (86400 * self.options.mtbf)), "fails", task)
            self.at(self.seconds(task) / SLICES, "has computed", task)

    def event(self, what, task, tries):
        if what == "starts again":
            self.queue.insert(0, task)
        elif task not in self.started or tries != self.tries[task]:
            return
        elif what == "has computed":
            self.disk.add(task, self.tasks[task][1] / SLICES)
            return
        else:
            self.disk.users.pop(task, None)
            self.failed += self.now - self.started.pop(task)
            self.at(self.options.requeue, "starts again", task)
        self.start()

    def served(self, task):
        """End a slice of a task; return whether it was the last one."""
        self.disk.users.pop(task)
        self.left[task] -= 1
        if self.left[task]:
            self.at(self.seconds(task) / SLICES, "has computed", task)
            return False
        self.on_disk += self.now - self.started.pop(task) - self.seconds(task)
        self.start()
        return True

    def run(self):
        """Return the time until the last task ends."""
        self.start()
        done = 0
        while done < len(self.tasks):
            when, task = self.disk.first()
            is_event = self.events and self.events[0][0] <= when
            if is_event:
                when, what, of, tries = heapq.heappop(self.events)
            self.now = when
            self.disk.advance(when)
            if is_event:
                self.event(what, of, tries)
            else:
                done += self.served(task)
        return self.now


def array_job(costs, options, rng):
    """Simulate a job array of tasks with these costs; return its time and where its machine time goes."""
    tasks = [
        (work + digests + opens * options.open_ms / 1e3, read + written)
        for work, digests, opens, read, written in costs
    ]
    machines = min(options.machines or len(tasks), len(tasks))
    array = Array(tasks, machines, options, rng)
    wall = array.run()
    shares = {
        "digests": sum(cost[1] for cost in costs),
        "opening files": sum(cost[2] for cost in costs) * options.open_ms / 1e3,
        "disk": array.on_disk,
        "failures": array.failed,
    }
    # A slow machine does the same work in more time, which counts as waiting, too.
    shares["waiting"] = machines * wall - sum(seconds for seconds, _ in tasks) - array.on_disk - array.failed
    return wall, machines, shares


def parts(whole, count):
    """Divide a number into so many whole parts of about equal size."""
    return [(i + 1) * whole // count - i * whole // count for i in range(count)]


def hours(seconds):
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def median(values):
    return sorted(values)[len(values) // 2]


def row(model, count, options, rng):
    ranges = min(count, model.layers)
    longest = math.ceil(model.layers / ranges)
    ranges = math.ceil(model.layers / longest)
    arrays = [
        [model.token_task(blocks) for blocks in parts(model.blocks, count)],
        [model.layer_task(layers, count) for layers in parts(model.layers, ranges)],
    ]
    runs = [[array_job(costs, options, rng) for costs in arrays] for _ in range(options.runs)]
    walls = [median([run[i][0] for run in runs]) for i in range(2)]
    used = [median([run[i][0] * run[i][1] for run in runs]) for i in range(2)]
    join = 3 * model.artifact / (1e9 * options.client) + 2 * model.artifact / (1e9 * options.digest)
    alone = model.blocks * model.block * model.flops / (1e12 * options.tflops) + model.fits(model.layers)
    alone += model.weights / (1e9 * options.client)
    wall = sum(walls) + join
    losses = {
        name: median([sum(array[2][name] for array in run) for run in runs]) / (sum(used) + join) for name in LOSSES
    }
    most = max(LOSSES, key=losses.get)
    return {
        "tasks": f"{count}, {ranges}",
        "token shards": hours(walls[0]),
        "layer parts": hours(walls[1]),
        "read": f"{sum(cost[3] for array in arrays for cost in array) / 1e12:.1f} TB",
        "written": f"{sum(cost[4] for array in arrays for cost in array) / 1e12:.1f} TB",
        "all": hours(wall),
        "speed-up": f"{alone / wall:.1f}",
        "efficiency": f"{100 * alone / (sum(used) + join):.0f}%",
        "largest loss": f"{most} {100 * losses[most]:.0f}%",
    }, alone


def table(name, options):
    blocks = options.tokens // options.block
    model = Model(MODELS[name], blocks, options.block, options)
    print(f"\n### {name}: {blocks} blocks of {options.block:,} tokens\n")
    for i, count in enumerate(count for count in options.counts if count <= blocks):
        cells, alone = row(model, count, options, random.Random(f"{options.seed} {name} {count}"))
        if i == 0:
            print(f"One machine with `calibrate --no-verdict`: {hours(alone)}.\n")
            print("| " + " | ".join(cells) + " |\n|" + "---:|" * (len(cells) - 1) + "---|")
        print("| " + " | ".join(cells.values()) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])

    def add(flag, default, text):
        parser.add_argument(flag, type=type(default), default=default, help=f"{text} (default: {default})")

    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which models (default: all)")
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS, help="numbers of token shards")
    parser.add_argument("--machines", type=int, help="machines at the same time (default: one for each task)")
    add("--tokens", 10_010_624, "tokens of the text")
    add("--block", 8192, "tokens per block")
    add("--dtype", 4, "bytes of a state: 4 for f32, 2 for bf16")
    add("--tflops", 1.3, "TFLOP/s of a machine in the forward pass")
    add("--fit-minutes", 1.25, "minutes that a machine takes for all fits of a KV head to 10 million tokens")
    add("--digest", 1.0, "GB/s of digests that a task computes")
    add("--disk", 10.0, "GB/s of the shared disk, for all machines together")
    add("--client", 2.0, "GB/s of the shared disk for one machine")
    add("--open-ms", 1.0, "milliseconds to open a file on the shared disk")
    add("--sigma", 0.2, "standard deviation of the logarithm of a machine's slowness")
    add("--mtbf", 90.0, "mean days until a machine fails")
    add("--requeue", 60.0, "seconds until a failed task starts again")
    add("--runs", 25, "simulations per row, of which the median counts")
    add("--seed", 0, "seed")
    options = parser.parse_args()
    for name in options.models:
        table(name, options)


if __name__ == "__main__":
    main()
