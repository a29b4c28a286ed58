"""Where files go. Modules not named here stay."""
from __future__ import annotations

PACKAGES = {"etude.worlds": "etude.sandbox"}
"""Every module of it that has no move of its own goes along."""

FILES = {
    "etude/run/demo.toml": "etude/commands/demo.toml",
    "tests/run/test_checkpoints.py": "tests/store/test_checkpoints.py",
    "tests/run/test_controller.py": "tests/run/test_loop.py",
    "tests/run/test_director.py": "tests/run/test_controller.py",
    "tests/run/test_data.py": "tests/trainer/test_data.py",
    "tests/run/test_documents.py": "tests/trainer/test_documents.py",
    "tests/run/test_peers.py": "tests/trainer/test_peers.py",
    "tests/run/test_step.py": "tests/trainer/test_step.py",
    "tests/run/test_trainer.py": "tests/trainer/test_trainer.py",
    "tests/run/test_distill.py": "tests/trainer/test_distill.py",
    "tests/run/test_lineage.py": "tests/trainer/test_lineage.py",
    "tests/run/test_exactness.py": "tests/trainer/test_exactness.py",
    "tests/run/lives.py": "tests/trainer/lives.py",
    "tests/run/test_launch.py": "tests/launch/test_launcher.py",
    "tests/run/test_local.py": "tests/launch/test_local.py",
    "tests/run/test_mismatch.py": "tests/commands/test_mismatch_command.py",
    "tests/run/test_weight_commands.py": "tests/commands/test_weight_commands.py",
    "tests/run/worlds_of_fakes.py": "tests/run/fake_stage.py",
    "tests/core/test_credit.py": "tests/core/test_advantage.py",
    "tests/train/test_meter.py": "tests/train/test_mismatch.py",
    "tests/train/test_rows.py": "tests/train/test_packing.py",
    "tests/train/test_ranks.py": "tests/train/test_distributed.py",
    "tests/train/ranks_work.py": "tests/train/distributed_work.py",
    "tests/serve/test_text.py": "tests/serve/test_detokenizer.py",
    "tests/worlds/test_walls.py": "tests/sandbox/test_isolation.py",
    "tests/worlds/test_sandbox.py": "tests/sandbox/test_sandbox.py",
    "tests/worlds/conftest.py": "tests/sandbox/conftest.py",
    "docs/agreement.md": "docs/mismatch.md",
    "docs/agreement-moe.md": "docs/mismatch-moe.md",
    "docs/decisions/0010-worlds.md": "docs/decisions/0010-sandboxes.md",
}

INITS = {
    "etude/trainer/__init__.py": '"""The trainer\'s process: its stages, the data that they read, and publication of what they learn."""\n',
    "etude/launch/__init__.py": '"""Starting, watching and stopping the processes of a run, and what a person sees of it meanwhile."""\n',
    "etude/commands/__init__.py": '"""The commands of the CLI, one file each."""\n',
}
