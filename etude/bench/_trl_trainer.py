"""TRL's side of the benchmark `trl`, run by the Python of `.venv-trl`: its GRPOTrainer, used as
documented.

    python -m etude.bench._trl_trainer MODEL

Prints one line of JSON: the seconds of training and, for every batch of answers, its time, number
and mean reward. All settings have TRL's defaults, except those that both sides share and those that
would only slow it down: gradient checkpointing, and bf16 autocast on a processor that multiplies
faster in fp32.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

from etude.bench._trl_task import (
    GROUP_SIZE,
    GROUPS_PER_STEP,
    LR,
    MAX_TOKENS,
    PROMPTS,
    STEPS,
    reward,
)


def main() -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    began = 0.0
    seen: list[tuple[float, int, float]] = []

    class Begin(TrainerCallback):
        def on_train_begin(self, *unused: Any, **also: Any) -> None:
            nonlocal began
            began = time.monotonic()

    def rewards(completions: list[list[dict[str, str]]], **unused: Any) -> list[float]:
        values = [reward(completion[0]["content"]) for completion in completions]
        seen.append((time.monotonic() - began, len(values), sum(values) / len(values)))
        return values

    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            per_device_train_batch_size=GROUPS_PER_STEP * GROUP_SIZE // 2,
            gradient_accumulation_steps=2,
            num_generations=GROUP_SIZE,
            max_completion_length=MAX_TOKENS,
            temperature=1.0,
            max_steps=STEPS,
            learning_rate=LR,
            lr_scheduler_type="constant",
            scale_rewards="none",
            gradient_checkpointing=False,
            bf16=product_seconds("bfloat16") < product_seconds("float32"),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=1,
            seed=0,
        )
        dataset = Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": prompt}] for prompt in PROMPTS]}
        )
        trainer = GRPOTrainer(
            model=sys.argv[1],
            reward_funcs=rewards,
            args=config,
            train_dataset=dataset,
            callbacks=[Begin()],
        )
        trainer.train()
    print(json.dumps({"seconds": time.monotonic() - began, "seen": seen}), flush=True)


def product_seconds(dtype: str) -> float:
    """Time of a matrix product: the fastest of three, since the first one includes setup."""
    import torch

    left = torch.randn(1024, 1024).to(getattr(torch, dtype))
    seconds: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        left @ left
        seconds.append(time.perf_counter() - began)
    return min(seconds)


if __name__ == "__main__":
    main()
