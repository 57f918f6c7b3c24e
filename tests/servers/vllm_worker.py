# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
`python vllm_worker.py ORDER ANSWER` serves a folder with vLLM in a process of its own. ORDER is a JSON file with
`folder`, `prompts` (lists of tokens), `max_tokens`, `options` of `vllm.LLM`, and whether to `import_depthmix` before.
"""

import json
import statistics
import sys
import time


def main():
    with open(sys.argv[1]) as file:
        order = json.load(file)
    if order["import_depthmix"]:
        import depthmix  # noqa: F401
    from vllm import LLM, SamplingParams

    options = {"trust_remote_code": True, "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 256}
    llm = LLM(order["folder"], **options | order["options"])
    prompts = [{"prompt_token_ids": prompt} for prompt in order["prompts"]]
    sampling = SamplingParams(temperature=0, max_tokens=order["max_tokens"], ignore_eos=True, detokenize=False)
    # the first time fills the cache of prefixes, which the others read
    texts, seconds = [], []
    for _ in range(order["rounds"]):
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        texts.append([list(each.outputs[0].token_ids) for each in outputs])
    answer = {
        "texts": texts,
        "seconds": seconds,
        "median_ms": statistics.median(seconds) * 1000 / order["max_tokens"],
        "cached_tokens": sum(each.num_cached_tokens or 0 for each in outputs),
        "has_depthmix": "depthmix" in sys.modules,
    }
    with open(sys.argv[2], "w") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main()
