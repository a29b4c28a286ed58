"""The benchmarks of `etude bench`, and their options."""

from __future__ import annotations

import argparse

from etude.serving_arguments import at_least_one

BENCHMARKS = {
    "borrowed": "a day of users in minutes: what RL gets of what they leave, and what it costs",
    "dash": "the dashboard over 100,000 rollouts: filters, a session of 200,000 tokens, memory",
    "delta": "weight deltas: size, and speed of one core at making and applying them",
    "diagnostics": "what linter and type checker say of a text that no file has: milliseconds",
    "edits": "speculative edits: forward passes over real edits, and time",
    "engine": "the engine's throughput, beside transformers, and vLLM (make bench-vllm)",
    "engine_cuda": "the engine on a CUDA device: tokens per second, share of the roofline",
    "fp8": "FP8 beside bf16 on a CUDA device: decoding, the trainer's forward pass, k3",
    "gateway": "what the gateway adds to a turn, beside LiteLLM's proxy (make bench-gateway)",
    "invariance": "batch invariance: what it costs at 1, 64 and 256 requests at once",
    "lag": "staleness: the demo's rl with a lag of 0, 2 and 8, and every correction",
    "long_context": "one session of 131,072 tokens on a CUDA device, decoded and trained on",
    "lora": "adapters in the engine: decoding with 1, 8 and 64 of them in one batch",
    "loop": "asynchrony: the same work with max_lag 0 and 2",
    "prediction": "the simulator's steps an hour beside those of the demo on this machine",
    "publish": "weight updates while a model is trained, every version checked",
    "ratio": "device time of rollouts over that of training, on one CUDA device",
    "realtime": "simulated users teach a model by real processes; what saboteurs take of it",
    "realtime_credit": "credit without groups: bias and variance of each baseline",
    "realtime_gate": "100 planted bad updates and 100 harmless ones before gate and canary",
    "realtime_saboteurs": "poisoned feedback: what 5 % saboteurs take from the gain",
    "realtime_show": "show or stay silent: where a policy begins to show, characters kept",
    "replay": "router replay: a sparse model whose engine computes in another precision",
    "sandboxes": "starts, bursts and forks of sandboxes, beside bubblewrap, crun and runsc",
    "summary": "trained summaries: failures and tokens of sessions that fit no window",
    "swap": "the pause of a swap: new weights for an 8B model on a CUDA device",
    "train": "the trainer's throughput: steps of rl as a run takes them",
    "trl": "beside TRL's GRPOTrainer on the same task (make bench-trl)",
}
"""Module of `etude.bench` -> description of its measurement."""


def add_bench(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "benchmarks:\n" + "\n".join(
        f"  {name:18} {text}" for name, text in BENCHMARKS.items()
    )
    parser.add_argument("name", metavar="NAME", help="one of the list below")
    parser.add_argument(
        "--model", metavar="DIR", help="engine, publish, edits: a Hugging Face directory"
    )
    parser.add_argument(
        "--steps",
        type=at_least_one,
        help="publish: versions after the first (default: 50); realtime: updates (default: 5); "
        "summary: of rl (default: 60)",
    )
    parser.add_argument(
        "--seed", type=int, help="summary, realtime: of the whole experiment (default: 0)"
    )
    parser.add_argument("--repo", metavar="DIR", help="edits: a git repository, for its history")
    parser.add_argument(
        "--pairs", metavar="DIR", help="delta: NAME_before.npy and NAME_after.npy, bf16 codes"
    )
    parser.add_argument("--sessions", type=at_least_one, help="gateway: at once (default: 1000)")
    parser.add_argument(
        "--shards",
        type=at_least_one,
        help="gateway: processes that share the sessions (default: 1)",
    )
    parser.add_argument(
        "--kills", action="store_const", const=True, help="gateway: kill it all the time, and count"
    )
    parser.add_argument(
        "--simulate",
        action="store_const",
        const=True,
        help="under virtual time; borrowed: days of users; sandboxes: 100,000 over 200 hosts; "
        "realtime: in one process, six seeds",
    )
    parser.add_argument(
        "--soak",
        type=at_least_one,
        metavar="N",
        help="sandboxes: open N with random kills, and count what is left",
    )
    parser.add_argument(
        "--repositories",
        type=at_least_one,
        metavar="FORKS",
        help="sandboxes: three packages of PyPI as images; test, fork, edit and grade each",
    )
    parser.add_argument(
        "--gigabytes", type=float, metavar="N", help="dash: whole groups of that size in all"
    )
