"""The benchmarks of `etude bench`, and their options."""

from __future__ import annotations

import argparse

from etude.serving_arguments import at_least_one

BENCHMARKS = {
    "borrowed": "a simulated day of users: what RL gains from lent capacity, and what it costs",
    "dash": "the dashboard over 100,000 rollouts: filters, a session of 200,000 tokens, memory",
    "delta": "weight deltas: size, and speed of one core at making and applying them",
    "diagnostics": "linter and type checker on text that is in no file, in milliseconds",
    "edits": "speculative edits: forward passes over real edits, and time",
    "engine": "the engine's throughput beside transformers and vLLM (make bench-vllm)",
    "engine_cuda": "the engine on a CUDA device: tokens per second, share of the roofline",
    "fp8": "FP8 and bf16 on a CUDA device: decoding, the trainer's forward pass, k3",
    "gateway": "what the gateway adds to a turn, beside LiteLLM's proxy (make bench-gateway)",
    "invariance": "the cost of batch invariance at 1, 64 and 256 concurrent requests",
    "lag": "staleness: the demo's rl with a lag of 0, 2 and 8, and every correction",
    "long_context": "one session of 131,072 tokens on a CUDA device, decoded and trained on",
    "lora": "adapters in the engine: decoding with 1, 8 and 64 of them in one batch",
    "loop": "asynchrony: the same work with max_lag 0 and 2",
    "prediction": "the simulator's prediction of steps per hour, beside the demo on this machine",
    "publish": "weight updates while a model is trained, every version checked",
    "ratio": "the ratio of GPU time for rollouts and for training, on one CUDA device",
    "realtime": "simulated users teach a model in real processes; the damage that saboteurs do",
    "realtime_credit": "credit without groups: bias and variance of each baseline",
    "realtime_gate": "100 planted bad updates and 100 harmless ones against gate and canary",
    "realtime_saboteurs": "poisoned feedback: how much of the gain 5 % saboteurs take away",
    "realtime_show": "show or stay silent: where a policy starts to show, and characters kept",
    "replay": "router replay: a sparse model whose engine computes in another precision",
    "sandboxes": "starts, bursts and forks of sandboxes, beside bubblewrap, crun and runsc",
    "summary": "trained summaries: failures and tokens of sessions longer than the context",
    "swap": "the pause of a weight swap for an 8B model on a CUDA device",
    "train": "the trainer's throughput in rl steps like those of a run",
    "trl": "the same task with Etude and TRL's GRPOTrainer (make bench-trl)",
}
"""Module of `etude.bench` -> description of its measurement."""


def add_bench(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "benchmarks:\n" + "\n".join(
        f"  {name:18} {text}" for name, text in BENCHMARKS.items()
    )
    parser.add_argument("name", metavar="NAME", help="a benchmark from the list below")
    parser.add_argument(
        "--model", metavar="DIR", help="engine, publish, edits: a Hugging Face directory"
    )
    parser.add_argument(
        "--steps",
        type=at_least_one,
        help="publish: versions after the first (default: 50); realtime: updates (default: 5); "
        "summary: rl steps (default: 60)",
    )
    parser.add_argument("--seed", type=int, help="summary, realtime: seed (default: 0)")
    parser.add_argument("--repo", metavar="DIR", help="edits: a git repository with history")
    parser.add_argument(
        "--pairs",
        metavar="DIR",
        help="delta: directory of NAME_before.npy and NAME_after.npy, bf16 codes",
    )
    parser.add_argument(
        "--sessions", type=at_least_one, help="gateway: concurrent sessions (default: 1000)"
    )
    parser.add_argument(
        "--shards",
        type=at_least_one,
        help="gateway: processes that share the sessions (default: 1)",
    )
    parser.add_argument(
        "--kills",
        action="store_const",
        const=True,
        help="gateway: kill gateway and workers over and over, and count lost turns",
    )
    parser.add_argument(
        "--simulate",
        action="store_const",
        const=True,
        help="run in virtual time; borrowed: days of users; sandboxes: 100,000 on 200 hosts; "
        "realtime: in one process, six seeds",
    )
    parser.add_argument(
        "--soak",
        type=at_least_one,
        metavar="N",
        help="sandboxes: open N with random kills, and count what is left behind",
    )
    parser.add_argument(
        "--repositories",
        type=at_least_one,
        metavar="FORKS",
        help="sandboxes: build three PyPI packages as images; test, fork, edit and grade each",
    )
    parser.add_argument(
        "--gigabytes", type=float, metavar="N", help="dash: total size of the recorded groups"
    )
