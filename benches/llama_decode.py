"""Time decode steps of llama.cpp: print {"tokens_per_s": ..} for a GGUF file, positions in the cache, type of cache, flash attention.

    python llama_decode.py GGUF CONTEXT f16|q8 0|1

Needs the package llama-cpp-python. The cache is filled with the state of a short prompt, restored again and again as other
sequences which then join the first one: its cells hold real keys and values, and every step reads all of them.
"""

import ctypes
import json
import os
import statistics
import sys
import time

import llama_cpp as llama

PROMPT = 256


def main():
    path, context, cache, flash = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "1"
    kind = {"f16": llama.GGML_TYPE_F16, "q8": llama.GGML_TYPE_Q8_0}[cache]
    runs, each = (6, 10) if context < 1 << 15 else (3, 4)
    # Room for the steps, and for one copy of the prompt.
    room = context + each * runs + 2 * PROMPT
    model = llama.Llama(path, n_ctx=room, n_batch=PROMPT, n_threads=os.cpu_count(), n_threads_batch=os.cpu_count(), type_k=kind, type_v=kind, flash_attn=flash, verbose=False)
    ctx = model.ctx
    memory = llama.llama_get_memory(ctx)
    tokens = list(range(1000, 1000 + PROMPT))
    model.eval(tokens)
    size = llama.llama_state_seq_get_size(ctx, 0)
    state = (ctypes.c_uint8 * size)()
    if llama.llama_state_seq_get_data(ctx, state, size, 0) == 0:
        sys.exit("error: llama.cpp gives no state of a sequence")
    filled = PROMPT
    while filled + PROMPT <= context:
        if llama.llama_state_seq_set_data(ctx, state, size, 1) == 0:
            sys.exit(f"error: llama.cpp does not restore the state at {filled} positions")
        llama.llama_memory_seq_cp(memory, 1, 0, -1, -1)
        llama.llama_memory_seq_rm(memory, 1, -1, -1)
        filled += PROMPT
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        for _ in range(each):
            model.eval([1000])
        times.append((time.perf_counter() - start) / each)
    print(json.dumps({"tokens_per_s": 1 / statistics.median(times), "filled": filled}))


if __name__ == "__main__":
    main()
