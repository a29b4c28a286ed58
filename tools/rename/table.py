"""Writes TABLE.md from rules.txt."""
import rules, textrules
_, _, moves, rows = rules.read()
out = ["# What is renamed", "", "Written by `table.py` from `rules.txt`; `apply.py` performs it. The last column: who says so, or why.", "",
       "## Config keys and values", "", "| old | new | who says so |", "|---|---|---|"]
why = {f"{o.rpartition('.')[2]}": w for _, o, n, w in rows if w}
out += ["| `[worlds]` | `[sandbox]` | every sandbox SDK; *world* is also the world size |",
        "| `invariant` | `batch_invariant` | vLLM: VLLM_BATCH_INVARIANT |", "| `trainer.weights` | `trainer.weights_dtype` | a key must explain itself |"]
out += [f"| `{o}` (stage) | `{n}` | {why.get(o, 'a key must explain itself')} |" for o, n in textrules.KEYS.items()]
names = {"praise": "Self-Imitation Learning (Oh et al. 2018)", "centered": "Dr. GRPO (Liu et al. 2025); TRL scale_rewards=\"none\"", "leave_one_out": "RLOO; TRL, verl",
         "std_normalised": "GRPO; TRL, verl", "batch_normalised": "REINFORCE++-baseline; verl, OpenRLHF; TRL scale_rewards=\"batch\""}
out += [f"| `advantage = \"{o}\"` | `\"{n}\"` | {names[o]} |" for o, n in textrules.ESTIMATORS.items()]
out += ["", "Kept, because the commands of the CLI and the last lines of `--json` keep their form: options (`--invariant`, `--max-batch`), the keys of",
        "`etude mismatch --json` (mapped in `commands/mismatch.py`), of `demo`, `run`, `eval` and `bench --json`.",
        "Kept for the refactoring that merges them: `Ask`, engine `Request`, `wire.Sampling` (-> `SamplingParams` + one `Request`).", "",
        "## Modules", "", "| old | new |", "|---|---|", "| `worlds/` (all of it) | `sandbox/` |"]
out += [f"| `{o.removeprefix('etude.')}` | `{n.removeprefix('etude.')}` |" for o, n in moves.items() if not o.startswith("etude.worlds")]
out += ["", "## Symbols", "", "| module (old) | old | new | who says so |", "|---|---|---|---|"]
out += [f"| {m.removeprefix('etude.')} | `{o}` | `{n}` | {w} |" for m, o, n, w in rows]
open("tools/rename/TABLE.md", "w").write("\n".join(out) + "\n")
