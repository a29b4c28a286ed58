from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.core.advantage import ADVANTAGE
from etude.core.config import STAGES, EngineConfig, RunConfig, parse
from etude.core.errors import EtudeError
from etude.core.harness_config import CodeConfig
from etude.core.sandbox_config import SandboxConfig
from etude.core.schema import OLD_ESTIMATORS, OLD_KEYS
from etude.core.stages import DistillConfig, DpoConfig, MidtrainConfig, RlConfig, SftConfig
from etude.core.trainer_config import TrainerConfig

GOOD = """
name = "demo"
seed = 3

[model]
hidden_size = 64

[engine]
regions = ["east", "west", "south"]

[[stage]]
kind = "midtrain"
steps = 10
lr = 1

[[stage]]
kind = "sft"
demonstrations = 100

[[stage]]
kind = "rl"
steps = 5
max_lag = 1
"""


def test_a_whole_config() -> None:
    config = parse(GOOD)
    assert (config.name, config.seed, config.model.hidden_size, config.model.num_layers) == (
        "demo",
        3,
        64,
        4,
    )
    assert config.engine.regions == ("east", "west", "south")
    midtrain, _, rl = config.stage
    assert isinstance(midtrain, MidtrainConfig) and midtrain.lr == 1.0
    assert isinstance(rl, RlConfig) and (rl.steps, rl.max_lag, rl.group_size) == (5, 1, 8)


def test_it_goes_through_json_unchanged() -> None:
    config = parse(GOOD)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_it_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse(GOOD).seed = 4


def test_overrides() -> None:
    values = (
        "stage.rl.steps=3",
        "stage.sft.lr = 1e-4",
        "stage.rl.max_lag=0",
        "seed=9",
        "harness.timeout_s=5",
    )
    others = (
        "sandbox.isolation=process",
        'name="quoted"',
        "engine.regions=['one']",
        "deterministic=true",
    )
    config = parse(GOOD, values + others)
    _, sft, rl = config.stage
    assert (config.seed, rl.steps, sft.lr, config.sandbox.isolation) == (9, 3, 1e-4, "process")  # type: ignore[union-attr]
    assert (config.name, config.engine.regions, config.harness.timeout_s) == (
        "quoted",
        ("one",),
        5.0,
    )
    assert config.deterministic


def test_an_invariant_run_computes_alike_on_both_sides() -> None:
    assert parse(
        GOOD, ["batch_invariant=true", "engine.threads=2", "stage.rl.threads=2"]
    ).batch_invariant
    with pytest.raises(EtudeError, match="same value for engine.threads and stage.rl.threads"):
        parse(GOOD, ["batch_invariant=true", "stage.rl.threads=2"])
    with pytest.raises(EtudeError, match='same device, "cpu" or "cuda", for engine'):
        parse(GOOD, ["batch_invariant=true", "engine.device=cuda"])
    with pytest.raises(EtudeError, match='same device, "cpu" or "cuda", for engine'):
        parse(GOOD, ["batch_invariant=true", "trainer.device=auto"])


def test_what_the_trainer_computes_in() -> None:
    assert parse(GOOD).trainer.compute_dtype == "auto"
    assert parse(GOOD, ["trainer.compute_dtype=bfloat16"]).trainer.compute_dtype == "bfloat16"
    with pytest.raises(EtudeError, match="leave out engine.dtype and trainer.compute_dtype"):
        parse(GOOD, ["batch_invariant=true", "trainer.compute_dtype=bfloat16"])
    with pytest.raises(
        EtudeError, match=r'trainer.compute_dtype = "bfloat16" already rounds the weights'
    ):
        parse(GOOD, ["trainer.compute_dtype=bfloat16", "trainer.published_dtype=float32"])


def test_a_model_from_a_directory() -> None:
    assert (
        parse(GOOD.replace("hidden_size = 64", 'path = "base"\nmax_context = 99')).model.path
        == "base"
    )
    with pytest.raises(EtudeError, match="model: path already decides hidden_size"):
        parse(GOOD, ["model.path=base"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed = 3", "seed 3", r"r.toml: not valid TOML: .*line 3.*, in `seed 3`"),
        ("seed = 3", 'seed = "3', r"line 3.*, in `seed = \"3`: a quote or a bracket may be"),
        ("seed = 3", "seed = 3\nseed = 4", r"not valid TOML: Cannot .*, in `seed = 4`$"),
        ("seed = 3", "steps = 3", "key steps in the top level: .* as stage.midtrain.steps"),
        ("seed = 3", "sead = 3", "r.toml: unknown key sead in the top level: did you mean seed"),
        (
            "hidden_size",
            "hiden_size",
            r"unknown key model.hiden_size in \[model\]: did you mean hidden_size",
        ),
        ("[engine]", "[engin]", "unknown key engin in the top level: did you mean engine"),
        ("max_lag", "maxlag", r"unknown key stage.rl.maxlag in \[stage.rl\]: did you mean max_lag"),
        (
            "max_lag",
            "zzz",
            r"unknown key stage.rl.zzz in \[stage.rl\]: valid keys are name, threads, steps, ",
        ),
        ('name = "demo"', "", "name is missing: it has no default"),
        (
            "demonstrations = 100",
            "",
            "stage.sft: there is nothing to imitate: set demonstrations, or the path",
        ),
        ("demonstrations = 100", "path = 3", "stage.sft.path = 3: input should be a valid string"),
        ('"demo"', '"../x"', "name: '../x' must be letters, digits and any of . _ -"),
        (
            "[model]",
            '[tasks]\nenvironment = "mine.py"\n[model]',
            r"tasks.environment: 'mine.py' must be code by name, FILE.py:NAME or",
        ),
        ("seed = 3", 'seed = "3"', "seed = '3': input should be a valid integer"),
        ("seed = 3", "seed = true", "seed = True: input should be a valid integer"),
        (
            "steps = 5",
            "steps = 0",
            "stage.rl.steps = 0: input should be greater than or equal to 1",
        ),
        (
            "lr = 1",
            "seq_len = 1",
            "stage.midtrain.seq_len = 1: input should be greater than or equal to 2",
        ),
        ("lr = 1", "lr = nan", "stage.midtrain.lr = nan: input should be a finite number"),
        (
            'kind = "rl"',
            'kind = "rll"',
            "stage number 3 needs kind = one of midtrain, sft, rl, dpo, distill; it has 'rll', "
            ".*rl",
        ),
        (
            'kind = "rl"',
            "",
            "stage number 3 needs kind = one of midtrain, sft, rl, dpo, distill; it has None",
        ),
        (
            "max_lag = 1",
            'advantage = "best"',
            "stage.rl.advantage: must be one of dr_grpo, rloo, grpo",
        ),
        (
            "max_lag = 1",
            "max_lag = 0\nreorder_window = 2",
            "stage.rl: reorder_window 2 leaves 15 slots .* from 1 to 1",
        ),
        (
            "hidden_size = 64",
            "num_heads = 3",
            "model: hidden_size 128 must be num_heads 3 times an even number",
        ),
        (
            "hidden_size = 64",
            "num_kv_heads = 3",
            "model: num_heads 4 must be a multiple of num_kv_heads 3",
        ),
        (
            '["east", "west", "south"]',
            '["a", "a"]',
            "engine.regions: two regions have the same name",
        ),
        ('["east", "west", "south"]', "[]", r"engine.regions = \[\]: .*at least 1 item"),
        (
            "[model]",
            '[sandbox]\nisolation = "none"\n[model]',
            "sandbox.isolation = 'none': .*'gvisor', 'vm', 'e2b', 'kubernetes' or 'process'",
        ),
        (
            "[model]",
            '[sandbox]\nisolation = "process"\nmin_isolation = "namespaces"\n[model]',
            'sandbox: isolation "process" is weaker than min_isolation "namespaces"',
        ),
        (
            "[model]",
            '[sandbox]\nhosts = ["http://h"]\nnetwork_log = "log"\n[model]',
            "sandbox: network_log only applies to sandboxes on this machine",
        ),
        (
            "[model]",
            '[sandbox]\nhosts = ["http://h"]\nmirrors = {"pypi.org" = "10.0.0.5:443"}\n[model]',
            "sandbox: mirrors only applies to sandboxes on this machine",
        ),
        (
            'kind = "midtrain"',
            'kind = "rl"',
            "two stages are called rl: give one of them a name = of its own",
        ),
        (
            "seed = 3",
            "deterministic = true",
            "deterministic = true needs max_lag = 0 in every stage and one name in",
        ),
        (
            "max_lag = 1",
            'loss = "bpo"',
            "stage.rl.loss: must be one of reinforce, .*, or your own as file.py:name",
        ),
        (
            "max_lag = 1",
            'correction = "some"',
            "stage.rl.correction = 'some': input should be 'none', 'truncated'",
        ),
        (
            "max_lag = 1",
            "effort_penalty = {scale = 0.1, turn = 1}",
            r"unknown key stage.rl.effort_penalty.turn .*did you mean turns",
        ),
        ("max_lag = 1", "clip_low = 0.1", r'loss = "reinforce" does not clip: leave out clip_low'),
        (
            "max_lag = 1",
            'loss = "dapo"\nclip_high = 0.1\ncorrection = "masked"',
            r'correction = "masked" already weights tokens .* or set correction = "none"',
        ),
        ("max_lag = 1", "effort_penalty = {scale = 1}", "it counts nothing: give tokens, calls or"),
        ("max_lag = 1", "effort_penalty = {turns = 1}", "stage.rl.effort_penalty.scale is missing"),
        (
            "lr = 1",
            '[[stage.sources]]\npath = "*.py"\nwieght = 2.0',
            r"unknown key stage.midtrain.sources.wieght in \[stage.midtrain.sources\]: did you "
            r"mean weight",
        ),
        (
            "lr = 1",
            'rope_scaling = {type = "yarn", factr = 2.0}',
            "unknown key stage.midtrain.rope_scaling.factr .* did you mean factor",
        ),
        (
            "lr = 1",
            'rope_scaling = {type = "yarn", factor = 2.0}',
            "rope_scaling stretches the model of model.path",
        ),
        (
            "lr = 1",
            "heldout_frac = 1.0",
            "stage.midtrain.heldout_frac = 1.0: input should be less than 1",
        ),
        ("lr = 1", "sources = []", r"stage.midtrain.sources = \[\]: .*at least 1 item"),
        (
            "[engine]",
            "[harness]\nturns = 1\n[engine]",
            "unknown key harness.turns .*did you mean max_turns",
        ),
        (
            "[engine]",
            "[harness]\ntemperature = 1\n[engine]",
            r"unknown key harness.temperature in \[harness\]: it is a key of a "
            r"\[\[stage\]\] of kind rl or distill",
        ),
        ("max_lag", "kl", "unknown key stage.rl.kl .*did you mean kl_coef"),
        (
            "seed = 3",
            'seed = 3\ntrackers = "wandb"',
            r"trackers = 'wandb': it must be a list, such as \['wandb'\]",
        ),
    ],
)
def test_bad_text(old: str, new: str, message: str) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new)
    if new == 'kind = "rl"':
        text = text.replace("lr = 1\n", "")
    with pytest.raises(EtudeError, match=message):
        parse(text, source="r.toml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "--set seed: write it as key=value"),
        ("=3", "--set =3: write it as key=value"),
        (
            "stage.steps=3",
            "--set stage.steps=3: address a stage as stage.NAME.KEY; .* midtrain, sft, rl",
        ),
        ("stage.dpo.steps=3", "--set stage.dpo.steps=3: address a stage as"),
        ("stage.rl.stepz=3", "unknown key stage.rl.stepz .*did you mean steps"),
        ("seed.a=3", "--set seed.a=3: seed is a value and has no keys"),
        ("model.hidden_size=big", "model.hidden_size = 'big': input should be a valid integer"),
        ("stage.rl=3", "address a stage as"),
        ("stage=3", "address a stage as"),
    ],
)
def test_bad_overrides(override: str, message: str) -> None:
    with pytest.raises(EtudeError, match=message):
        parse(GOOD, [override])


def test_no_stage_at_all() -> None:
    with pytest.raises(EtudeError, match="stage is missing: a run needs at least one"):
        parse('name = "x"')
    for text in ("stage = 3", "stage = 3\nlr = 1"):
        with pytest.raises(EtudeError, match=r"stage: write \[\[stage\]\], not stage = 3: there"):
            parse(f'name = "x"\n{text}')
    with pytest.raises(EtudeError, match=r"the stages of .* are \(none\)"):
        parse('name = "x"\nstage = 3', ["stage.rl.steps=1"])


def test_a_table_that_should_be_a_list_of_tables() -> None:
    with pytest.raises(EtudeError, match=r"stage: write \[\[stage\]\], not \[stage\]"):
        parse('name = "x"\n[stage]\nkind = "rl"')
    with pytest.raises(EtudeError, match=r"sources: write \[\[stage.sources\]\], not"):
        parse('name = "x"\n[[stage]]\nkind = "midtrain"\nsteps = 1\n[stage.sources]\npath = "a"')
    with pytest.raises(EtudeError, match="engine.regions = {'a': 1}: it must be a list$"):
        parse(GOOD, ["engine.regions={a = 1}"])


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(EtudeError) as told:
        parse(GOOD.replace("seed = 3", "sed = 3").replace("steps = 5", "steps = -1"))
    assert len(str(told.value).splitlines()) == 2


def test_a_lineage_in_any_order_with_a_kind_more_than_once() -> None:
    text = GOOD + '[[stage]]\nname = "again"\nkind = "sft"\npath = "good/*.jsonl"\n'
    text += '[[stage]]\nname = "more"\nkind = "rl"\nsteps = 2\n'
    config = parse(text, ["stage.again.lr=1e-4", "stage.more.steps=3"])
    assert [stage.name for stage in config.stage] == ["midtrain", "sft", "rl", "again", "more"]
    again, more = config.stage[3:]
    assert (again.kind, again.lr, more.kind, more.steps) == ("sft", 1e-4, "rl", 3)  # type: ignore[union-attr]
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_a_mistake_in_the_only_stage_is_one_line() -> None:
    with pytest.raises(EtudeError) as caught:
        parse('name = "a"\n[[stage]]\nkind = "rl"\nsteps = 1\nloss_aggregation = "tokens"\n')
    expected = (
        "config: stage.rl.loss_aggregation = 'tokens': "
        "input should be 'token', 'sequence' or 'constant'"
    )
    assert str(caught.value) == expected


EVERY_KIND = """
name = "plain"
[[stage]]
kind = "midtrain"
steps = 1
[[stage]]
kind = "sft"
path = "sessions.jsonl"
[[stage]]
kind = "dpo"
path = "pairs.jsonl"
[[stage]]
kind = "rl"
steps = 1
effort_penalty = {scale = 0.1, turns = 1}
[[stage]]
kind = "distill"
steps = 1
teacher = "large"
"""


def test_what_is_left_out_means_what_it_meant() -> None:
    """Changing a default turns every file that relies on it into another experiment, and runs that
    were stopped refuse to resume. A change of a default must therefore also change `defaults.json`,
    and be announced to users."""
    expected = json.loads((Path(__file__).parent / "defaults.json").read_text())
    assert parse(EVERY_KIND).model_dump(mode="json") == expected


ON_CUDA = ["batch_invariant=true", "engine.device=cuda", "trainer.device=cuda"]


def test_batch_invariance_on_a_device() -> None:
    assert parse(EVERY_KIND, ON_CUDA).batch_invariant


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["stage.midtrain.heldout_frac=0.1", "stage.midtrain.heldout_path=x"],
            "leave out one of them",
        ),
        (["trainer.ranks=3", "trainer.context_parallel=2"], "does not divide trainer.ranks = 3"),
        (["trainer.ranks=3", "trainer.expert_parallel=2"], "does not divide trainer.ranks = 3"),
        (
            ["batch_invariant=true", "engine.dtype=bfloat16"],
            "batch_invariant = true computes in float32",
        ),
        (
            ["batch_invariant=true", "trainer.compute_dtype=bfloat16"],
            "batch_invariant = true computes in float32",
        ),
        (
            ["batch_invariant=true", "engine.device=cuda"],
            'needs the same device, "cpu" or "cuda", for engine',
        ),
        (
            ["batch_invariant=true", "engine.device=auto", "trainer.device=auto"],
            'needs the same device, "cpu" or "cuda", for engine',
        ),
        ([*ON_CUDA, "trainer.ranks=2"], "on CUDA computes in bfloat16 on one rank"),
        ([*ON_CUDA, "trainer.published_dtype=float32"], "on CUDA computes in bfloat16 on one rank"),
        ([*ON_CUDA, "engine.dtype=float32"], "on CUDA computes in bfloat16 on one rank"),
        (
            ["deterministic=true", "stage.rl.max_lag=0", "stage.distill.max_lag=0"],
            "one name in engine.regions",
        ),
        (
            ["deterministic=true", "engine.regions=['a']", "stage.rl.max_lag=0"],
            "max_lag = 0 in every stage",
        ),
        (["model.path=base", "model.num_heads=8"], "path already decides num_heads"),
        (["model.hidden_size=132", "model.num_heads=44"], "times an even number"),
        (
            ["stage.rl.group_size=1"],
            "stage.rl.group_size = 1: input should be greater than or equal to 2",
        ),
        (
            ["stage.rl.correction_cap=0.9"],
            "stage.rl.correction_cap = 0.9: .* greater than or equal to 1",
        ),
        (
            ["stage.rl.router_replay_min_score=1.1"],
            "stage.rl.router_replay_min_score = 1.1: .* less than or equal to 1",
        ),
        (["model.max_context=1"], "model.max_context = 1: .* greater than or equal to 2"),
        (["engine.port=65536"], "engine.port = 65536: .* less than or equal to 65535"),
        (["trainer.ranks=0"], "trainer.ranks = 0: .* greater than or equal to 1"),
        (["stage.rl.lr=0"], "stage.rl.lr = 0: .* greater than 0"),
        (["stage.rl.kl_coef=-0.1"], "stage.rl.kl_coef = -0.1: .* greater than or equal to 0"),
    ],
)
def test_settings_that_contradict(overrides: list[str], message: str) -> None:
    with pytest.raises(EtudeError, match=message):
        parse(EVERY_KIND, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["stage.midtrain.heldout_frac=0.1"],
        ["stage.midtrain.heldout_path=x"],
        ["batch_invariant=true", "stage.midtrain.threads=4"],
        [
            "deterministic=true",
            "stage.rl.max_lag=0",
            "stage.distill.max_lag=0",
            "engine.regions=['a']",
        ],
        ["stage.rl.microbatch_tokens=1"],  # a longer session gets a pass of its own
        ["model.hidden_size=8", "model.num_heads=4", "model.num_kv_heads=4"],
        ["model.path=base", "stage.midtrain.rope_scaling={type='yarn', factor=1.5}"],
        [
            "stage.rl.correction_cap=1",
            "stage.rl.router_replay_min_score=1",
            "stage.rl.kl_coef=0",
            "stage.rl.group_size=2",
        ],
        ["engine.port=65535", "model.max_context=2", "stage.midtrain.seq_len=2"],
        ["stage.rl.loss=mine.py:loss"],
    ],
)
def test_the_last_setting_that_is_allowed(overrides: list[str]) -> None:
    parse(EVERY_KIND, overrides)


def test_only_the_first_stage_stretches_a_model() -> None:
    later = (
        '[[stage]]\nname = "long"\nkind = "midtrain"\nsteps = 1\nrope_scaling = {type = "yarn", '
        "factor = 2.0}\n"
    )
    with pytest.raises(
        EtudeError,
        match="stage.long.rope_scaling stretches the model of model.path from the first",
    ):
        parse(EVERY_KIND + later, ["model.path=base"])


def test_a_text_needs_no_quotation_marks_and_may_stand_apart() -> None:
    config = parse(
        EVERY_KIND, ["stage.dpo.path = a file.jsonl ", "model.path=a=b", 'name = "quoted" ']
    )
    assert (config.stage[2].path, config.model.path, config.name) == (  # type: ignore[union-attr]
        "a file.jsonl",
        "a=b",
        "quoted",
    )


@pytest.mark.parametrize(
    ("old", "message"),
    [
        (
            "worlds.isolation=process",
            "unknown key worlds in the top level: it is now called sandbox",
        ),
        (
            "invariant=true",
            "unknown key invariant in the top level: it is now called batch_invariant",
        ),
        (
            "trainer.weights=float32",
            "unknown key trainer.weights in .trainer.: it is now called trainer.published_dtype",
        ),
        (
            "stage.rl.credit=praise",
            "unknown key stage.rl.credit in .stage.rl.: it is now called advantage",
        ),
        (
            "stage.rl.warmup=1",
            "unknown key stage.rl.warmup in .stage.rl.: it is now called warmup_steps",
        ),
        (
            "stage.midtrain.held_out=0.1",
            "unknown key stage.midtrain.held_out in .*: it is now called heldout_frac",
        ),
        (
            "silence_s=5",
            "unknown key silence_s in the top level: it is now called heartbeat_timeout_s",
        ),
        ("stage.rl.advantage=praise", "stage.rl.advantage: praise is now called self_imitation"),
    ],
)
def test_an_old_key_is_told_its_new_name(old: str, message: str) -> None:
    with pytest.raises(EtudeError, match=message):
        parse(GOOD, [old])


OTHERS_RENAMED = {
    "trainer.compute": "trainer.compute_dtype",
    "trainer.weights_dtype": "trainer.published_dtype",
    "engine.max_batch": "max_num_seqs",
    "engine.vllm": "vllm_urls",
    "sandbox.processes": "max_processes",
    "sinks": "trackers",
}


def test_no_old_key_is_taken_for_a_slip_of_the_pen() -> None:
    stage = {
        "midtrain": {
            "separate": "document_mask",
            "held_out_path": "heldout_path",
            "held_out_every": "heldout_every",
            "row_tokens": "seq_len",
            "decay": "lr_schedule",
            "compute": "trainer.compute_dtype",
        },
        "rl": {
            "replay": "router_replay",
            "plausible": "router_replay_min_score",
            "balance": "router_balance",
            "lookahead": "reorder_window",
            "aggregate": "loss_aggregation",
            "ratio_cap": "correction_cap",
        },
    }
    renamed = {f"stage.{kind}.{old}": new for kind in stage for old, new in stage[kind].items()}
    for old, new in (renamed | OTHERS_RENAMED).items():
        with pytest.raises(EtudeError, match=f"unknown key {old} in .*: it is now called {new}"):
            parse(GOOD, [f"{old}=1"])
    for old, new in {
        "centered": "dr_grpo",
        "leave_one_out": "rloo",
        "std_normalised": "grpo",
        "batch_normalised": "reinforce_plus_plus_baseline",
    }.items():
        with pytest.raises(EtudeError, match=f"{old} is now called {new}"):
            parse(GOOD, [f"stage.rl.advantage={old}"])


def test_every_old_key_is_gone_and_every_new_one_is_there() -> None:
    tables = (RunConfig, EngineConfig, SandboxConfig, TrainerConfig, CodeConfig, *STAGES.values())
    known = {key for table in tables for key in table.model_fields}
    for old, new in OLD_KEYS.items():
        assert old.rpartition(".")[2] not in known - {"weights"} and new.rpartition(".")[2] in known
    assert set(OLD_ESTIMATORS.values()) <= set(ADVANTAGE)


def test_a_vllm_server_belongs_to_a_region_and_promises_no_bits() -> None:
    base = (
        'name = "a"\n{top}\n[engine]\nregions = ["east"]\nvllm_urls = {{{region} = "http://h:1"}}\n'
        + ('[[stage]]\nkind = "rl"\nsteps = 1\nmax_lag = 0\n')
    )
    assert parse(base.format(top="", region="east")).engine.vllm_urls == {"east": "http://h:1"}
    with pytest.raises(
        EtudeError, match="vllm_urls names west, which is not one of the regions east"
    ):
        parse(base.format(top="", region="west"))
    for top in ("deterministic = true", "batch_invariant = true"):
        with pytest.raises(EtudeError, match="does not guarantee bitwise results"):
            parse(base.format(top=top, region="east"))
    for top in ('quantization = "fp8"', 'kv_cache_dtype = "fp8"'):
        with pytest.raises(EtudeError, match="set by the server's own options"):
            parse(base.format(top=top, region="east"))


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("engine.max_bach=3", "--set engine.max_bach=3: unknown key engine.max_bach"),
        ("stage.more.lr=-1", "--set stage.more.lr=-1: stage.rl.lr = -1"),
        ("model=3", "--set model=3: model = 3"),
        ("model.hidden_size=7", "r.toml with --set model.hidden_size=7: model: hidden_size 7"),
        ("deterministic=true", "r.toml with --set deterministic=true: deterministic = true needs"),
    ],
)
def test_a_mistake_in_an_override_is_not_blamed_on_the_file(override: str, told: str) -> None:
    text = GOOD + '[[stage]]\nname = "more"\nkind = "rl"\nsteps = 2\n'
    with pytest.raises(EtudeError) as caught:
        parse(text, ["seed=3", override] if "." in override else [override], source="r.toml")
    assert str(caught.value).startswith(told)


def test_a_mistake_in_the_file_is_not_blamed_on_an_override() -> None:
    with pytest.raises(EtudeError, match="^r.toml: seed = 'x'"):
        parse(GOOD.replace("seed = 3", 'seed = "x"'), ["engine.port=1"], source="r.toml")


def test_only_a_built_folder_of_tasks_is_mounted() -> None:
    """Other environments give `path` their own meaning, and need not have such a folder."""
    built = parse(
        GOOD, ["tasks.environment=etude.run.task_folder:TaskFolder", "tasks.path=/data/tasks"]
    )
    assert built.tasks.mounts == ("/data/tasks/venvs:/opt/venvs",)
    for environment in ("mine.py:Mine", "pull", "https://host"):
        own = parse(GOOD, [f"tasks.environment={environment}", "tasks.path=/data/tasks"])
        assert own.tasks.mounts == ()


def test_every_path_starts_at_the_folder() -> None:
    text = """
name = "a"
[model]
path = "model"
[tasks]
environment = "env.py:E"
path = "tasks"
[harness]
agent = "package.agent:A"
[sandbox]
mounts = [".venv", "/opt/x"]
[[stage]]
kind = "midtrain"
steps = 1
heldout_path = "h/*.txt"
sources = [{path = "built-in"}, {path = "s/**/*.py"}]
[[stage]]
kind = "sft"
path = "/abs/*.jsonl"
[[stage]]
kind = "dpo"
path = "p.jsonl"
[[stage]]
kind = "rl"
steps = 1
loss = "../loss.py:L"
[[stage]]
kind = "distill"
steps = 1
teacher = "large"
"""
    config = parse(text).seen_from(Path("/f"))
    midtrain, sft, dpo, rl, distill = config.stage
    assert config.model.path == "/f/model" and config.tasks.path == "/f/tasks"
    assert config.tasks.environment == "/f/env.py:E"
    assert config.harness.agent == "package.agent:A"
    assert config.sandbox.mounts == ("/f/.venv", "/opt/x")
    assert isinstance(midtrain, MidtrainConfig) and midtrain.heldout_path == "/f/h/*.txt"
    assert [source.path for source in midtrain.sources] == ["built-in", "/f/s/**/*.py"]
    assert isinstance(sft, SftConfig) and sft.path == "/abs/*.jsonl"
    assert isinstance(dpo, DpoConfig) and dpo.path == "/f/p.jsonl"
    assert isinstance(rl, RlConfig) and rl.loss == "/f/../loss.py:L"
    assert isinstance(distill, DistillConfig) and distill.teacher == "/f/large"
    plain = parse(GOOD, ["tasks.environment=https://host/x.py", "stage.rl.loss=grpo"])
    assert plain.seen_from(Path("/f")) == plain


def test_several_greedy_attempts_would_be_one() -> None:
    """So they are sampled, unless the config sets a temperature."""
    greedy = parse(GOOD, ["eval.temperature=0"]).eval
    assert [greedy.temperature_of(samples) for samples in (1, 2, 8)] == [0.0, 1.0, 1.0]
    warm = parse(GOOD, ["eval.temperature=0.5"]).eval
    assert [warm.temperature_of(samples) for samples in (1, 2, 8)] == [0.5] * 3


@pytest.mark.parametrize(
    ("harness", "told"),
    [
        ("summarise_at = 200\nmax_tokens = 60", "leaves no room for a summary of"),
        (
            'summarise_at = 100\ncommand = ["agent"]',
            "harness.summarise_at only works with an agent that",
        ),
        (
            'summarise_tool = true\ncommand = ["agent"]',
            "harness.summarise_tool only works with an agent",
        ),
    ],
)
def test_summaries_need_room_and_an_agent_that_runs_here(harness: str, told: str) -> None:
    text = f"""
name = "x"
[model]
max_context = 256
[harness]
{harness}
[[stage]]
kind = "rl"
steps = 1
"""
    with pytest.raises(EtudeError, match=told):
        parse(text)
    assert parse(text.replace(harness, "summarise_at = 100")).harness.summaries == {
        "summarise_at": 100
    }


def test_a_key_of_a_stage_is_told_with_the_stage_that_has_it() -> None:
    with pytest.raises(EtudeError, match=r"--set steps=9: .*, as stage\.mine\.steps$"):
        parse('name = "x"\n[[stage]]\nkind = "rl"\nname = "mine"\nsteps = 3\n', ["steps=9"])
