"""vLLM's side of the benchmark `engine`, run by the Python of `.venv-vllm`.

    python -m etude.bench._vllm_engine MODEL DTYPE SECONDS.json < rounds.json

Standard input is a list of rounds, each a list of prompts as token ids. The file gets the list of
seconds that vLLM's offline engine takes to answer each round, `NEW` tokens a prompt.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

NEW = 64


def main() -> None:
    from vllm import LLM, SamplingParams

    model, dtype, out = sys.argv[1:]
    rounds = json.load(sys.stdin)
    engine = LLM(
        model=model,
        dtype=dtype,
        max_model_len=256,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    params = SamplingParams(temperature=1.0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    seconds = []
    for prompts in rounds:
        began = time.perf_counter()
        answers = engine.generate(
            [{"prompt_token_ids": tokens} for tokens in prompts], params, use_tqdm=False
        )
        seconds.append(time.perf_counter() - began)
        assert all(len(answer.outputs[0].token_ids) == NEW for answer in answers)
    Path(out).write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
