"""vLLM's CPU build behind a pipe, run by its own Python (``bench_cpu_decode.py --vllm PYTHON``).

A line in is one round: its prompts and ``num_steps``; a line out is its figures, in
milliseconds, from the same prompts as the others have. Between rounds it waits in a read.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main(folder: str, dtype: str) -> None:
    """Serve rounds until the pipe ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM talks on stdout
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype=dtype,
        max_model_len=2048,
        max_num_seqs=8,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def generate_ms(prompts: list[list[int]], num_tokens: int) -> float:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        started = time.perf_counter()
        engine.generate(inputs, sampling, use_tqdm=False)
        return (time.perf_counter() - started) * 1e3

    for line in sys.stdin:
        asked = json.loads(line)
        figures = {"prefill_ms": generate_ms(asked["long"], 1)}
        for prompts in (asked["one"], asked["eight"]):
            # The prompt's own time is taken off; it comes from a run of the same prompts.
            to_first = generate_ms(prompts, 1)
            whole = generate_ms(prompts, 1 + asked["num_steps"])
            figures[f"decode_b{len(prompts)}_step_ms"] = (whole - to_first) / asked["num_steps"]
        print(json.dumps(figures), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
