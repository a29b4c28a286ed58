"""Tests of the structure of the code: allowed imports, light processes, and agreement with the
documents."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from etude.core.config import parse
from etude.core.schema import OLD_KEYS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "etude"

# Allowed imports, in addition to the package itself and core. A name stands for itself and all
# modules below it, on both sides; a module also inherits the permissions of all names above it.
# cli -> commands -> launch, run, trainer -> everything else -> core; bench drives whole runs.
MIDDLE = {
    "dash",
    "engine",
    "harness",
    "model",
    "rewards",
    "serve",
    "store",
    "tasks",
    "train",
    "weights",
    "sandbox",
}
EDGES: dict[str, set[str]] = {
    "cli": {"arguments", "bench_arguments", "serving_arguments", "commands", "launch"},
    "commands.realtime": {"realtime.cycle"},
    "arguments": {
        "bench_arguments",
        "serving_arguments",
        "task_arguments",
        "weights_arguments",
    },
    "bench_arguments": {"serving_arguments"},
    "task_arguments": {"serving_arguments"},
    "weights_arguments": {"serving_arguments"},
    "serving_arguments": set(),
    "__main__": {"cli"},
    "commands": {"dash", "engine", "model", "serve", "store", "train", "weights", "launch", "run"}
    | {"sandbox"},
    "commands.tasks": {"factory"},
    "commands.images": {"factory"},
    "commands.trial": {"trainer.prepare"},
    "commands.plan": {"trainer.estimate"},
    "commands.simulate": {"simulate"},
    "simulate": set(),
    "realtime": set(),
    "launch": {
        "dash",
        "serve.heartbeat",
        "serve.process",
        "serve.tokens",
        "store",
        "weights",
        "run",
        "trainer.prepare",
    },
    "launch.check": {"trainer.estimate"},
    "launch.realtime": {"serve.production.config"},
    "trainer": {"engine", "harness", "model", "store", "tasks", "train", "weights"}
    | {"run.plugins", "run.process", "serve.heartbeat"},
    "run.realtime": {"realtime"},
    "run.realtime_probes": {"realtime"},
    "run.realtime_sessions": {"realtime"},
    "run": {"rewards", "sandbox", "serve", "store", "tasks", "weights"},
    "run.task_folder": {"factory"},
    "run.harbor_tasks": {"factory"},
    "run.openenv_environment": {"harness"},
    "run.diagnose": {"engine", "model", "train"},
    "run.trials": {"engine", "model", "train"},
    "run.operators": {"model"},
    "bench": MIDDLE | {"commands", "launch", "realtime", "run", "trainer"},
    "bench._sandbox_repositories": {"factory"},
    "bench.prediction": {"simulate"},
    "dash": {"store"},
    "factory": {"rewards", "sandbox"},
    "dash.fleet": {"weights.manifest"},
    "dash.realtime": {"weights.manifest"},
    "dash.server": {"model.directory", "model.tokenizer"},
    "rewards": {"tasks.repair"},
    "engine": {"model"},
    "train": {"model"},
    "weights": {"store"},
    "serve": {"model.directory", "model.tokenizer", "store"}
    | {"model.detokenizer", "model.output_parser", "model.tool_calls"},
    "serve.engine_thread": {"engine"},
    "serve.worker": {"engine", "weights", "model"},
    "serve.relay": {"weights"},
    "serve.vllm": {"model"},
}

# Allowed imports from outside the standard library, by the same rule of names.
TORCH = {"torch", "numpy", "safetensors"}
OUTSIDE: dict[str, set[str]] = {
    "cli": {"rich"},
    "core.config": {"pydantic"},
    "core.harness_config": {"pydantic"},
    "core.lend_config": {"pydantic"},
    "core.lora_config": {"pydantic"},
    "core.model_config": {"pydantic"},
    "core.placement_config": {"pydantic"},
    "core.realtime_config": {"pydantic"},
    "core.rewards_config": {"pydantic"},
    "core.sandbox_config": {"pydantic"},
    "core.schema": {"pydantic"},
    "core.stages": {"pydantic"},
    "core.tasks_config": {"pydantic"},
    "store": {"obstore", "msgspec", "blake3"},
    "store.rollouts": {"arro3", "numpy"},
    "weights": TORCH | {"blake3"},
    "weights.signing": {"cryptography"},
    "dash.answers": {"numpy"},
    "dash.guard": {"starlette"},
    "dash.server": {"starlette", "msgspec", "blake3"},
    "dash.table": {"numpy"},
    "bench": {"torch", "numpy", "zstandard"},
    "bench.engine": {"transformers"},
    "bench.borrowed": {"aiohttp", "msgspec"},
    "bench.gateway": {"aiohttp", "uvloop"},
    "bench.realtime": {"aiohttp", "rich"},
    "bench._realtime_tasks": {"aiohttp"},
    "bench._kills": {"aiohttp", "msgspec", "uvloop"},
    "bench._load": {"msgspec"},
    "bench._servers": {"aiohttp"},
    "bench.engine_cuda": {"torch", "transformers"},
    "bench._trl_trainer": {"trl", "datasets", "transformers"},
    "bench._vllm_engine": {"vllm"},
    "model": TORCH | {"tokenizers", "jinja2"},
    "model.from_gguf": {"gguf"},
    "model.cudnn_attention": {"cudnn"},
    "engine": TORCH,
    "engine.kernels": {"triton"},
    "train": TORCH,
    "train.adamw_kernel": {"triton"},
    "serve": {"starlette", "uvicorn", "uvloop", "httptools", "aiohttp", "msgspec"},
    "sandbox.envd": {"starlette"},
    "sandbox.host_app": {"starlette"},
    "sandbox.remote": {"aiohttp"},
    "sandbox.e2b": {"aiohttp"},
    "sandbox.cluster": {"aiohttp"},
    "sandbox.kubernetes": {"aiohttp"},
    "sandbox.service": {"aiohttp"},
    "serve.grammar_matcher": {"llguidance", "numpy"},
    "serve.engine_thread": {"torch"},
    "serve.worker": {"torch"},
    "serve.vllm": {"torch", "numpy"},
    "harness": {"aiohttp"},
    "rewards.judge": {"aiohttp"},
    "realtime": {"numpy"},
    "factory.mutations": {"libcst"},
    "factory.survey_plugin": {"coverage"},
    "tasks": {"tokenizers"},
    "tasks.sources": {"pyarrow"},
    "commands": {"torch", "rich"},
    "commands.serve": {"starlette"},
    "commands.trial": {"aiohttp"},
    "launch": {"rich"},
    "launch.lender": {"aiohttp"},
    "launch.ray": {"ray"},
    "launch.ray_host": {"ray"},
    "trainer": {"torch", "numpy"},
    "run": {"aiohttp", "msgspec"},
    "run.diagnose": {"torch"},
    "run.trials": {"torch", "numpy"},
    "run.operators": {"torch"},
    "run.sinks": {"tensorboard", "wandb", "trackio"},
    "run.verifiers_environment": {"verifiers"},
}

# Packages that only an extra installs: they are imported where they are used, and a missing one is
# reported in one clear sentence.
OPTIONAL = {"cryptography", "gguf", "pyarrow", "tensorboard", "trackio", "wandb", "zstandard"} | {
    "coverage",
    "libcst",
    "ray",
    "ruff",
    "ty",
    "verifiers",
    "uv",
}

# Packages that nobody has to install: triton comes with a CUDA build of torch, cudnn makes the
# trainer faster with one, and benchmarks compare with the others.
ELSEWHERE = {"triton", "cudnn", "transformers", "trl", "datasets", "vllm"}

# Modules that start in a process which must stay light.
WITHOUT_TORCH = [
    "etude.cli",
    "etude.store.runs",
    "etude.weights.manifest",
    "etude.model.directory",
    "etude.model.tokenizer",
    "etude.serve.gateway",
    "etude.run.loop",
    "etude.run.controller",
    "etude.launch.launcher",
    "etude.commands.dash",
]

MAX_BROAD_EXCEPTS = 3
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


@dataclass(frozen=True, slots=True)
class Module:
    name: str
    """Dotted name without the leading `etude.`; empty for the package itself."""
    path: Path
    tree: ast.Module

    @cache  # noqa: B019
    def imports(self) -> tuple[tuple[str, bool, int], ...]:
        return tuple(self._imports())

    def _imports(self) -> Iterator[tuple[str, bool, int]]:
        """(full dotted name, inside a function, line) of every import, anywhere in the file."""
        lazy = {
            id(inner)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for inner in ast.walk(node)
        }
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, id(node) in lazy, node.lineno
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}:{node.lineno}: imports are absolute"
                for alias in node.names:
                    yield f"{node.module}.{alias.name}", id(node) in lazy, node.lineno


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found.append(Module(name, path.relative_to(ROOT), ast.parse(path.read_text(), str(path))))
    return tuple(found)


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def allowed(table: dict[str, set[str]], name: str) -> set[str]:
    return set().union(*(targets for prefix, targets in table.items() if within(name, prefix)))


def violation(module: str, target: str, lazy: bool) -> str | None:
    """The reason why `module` may not import `target`, or None if it may."""
    top, _, rest = target.partition(".")
    if top == "etude":
        own = module.partition(".")[0]
        if module == "cli" and lazy:
            return None
        if (
            not rest
            or rest == "__version__"
            or any(within(rest, name) for name in {own, "core"} | allowed(EDGES, module))
        ):
            return None
        return f"{module} may not import etude.{rest}"
    if top in sys.stdlib_module_names or top in allowed(OUTSIDE, module):
        return None
    return f"{module} may not import {top}"


@pytest.mark.parametrize(
    ("module", "target", "lazy", "fine"),
    [
        ("run.loop", "etude.serve.router.Router", False, True),
        ("core.window", "etude.core.types.Task", False, True),
        ("core.window", "etude.store.log.Log", False, False),
        ("core.window", "etude.store.log.Log", True, False),
        ("core.window", "pydantic", False, False),
        ("engine.runner", "etude.train.loss", False, False),
        ("engine.runner", "aiohttp", True, False),
        ("serve.worker", "etude.engine.engine.Engine", False, True),
        ("serve.gateway", "etude.engine.engine.Engine", False, False),
        ("serve.gateway", "etude.model.transformer", False, False),
        ("serve.gateway", "torch", True, False),
        ("cli", "etude.bench.loop", True, True),
        ("cli", "etude.bench.loop", False, False),
        ("tasks.factory", "etude.run.environment", False, False),
    ],
)
def test_the_rule_itself(module: str, target: str, lazy: bool, fine: bool) -> None:
    assert (violation(module, target, lazy) is None) == fine


def test_imports_point_down() -> None:
    broken = [
        f"{module.path}:{line}: {why}"
        for module in modules()
        for target, lazy, line in module.imports()
        if (why := violation(module.name, target, lazy))
    ]
    assert not broken, "\n".join(broken)


def test_no_circles() -> None:
    """No module imports itself through others, counting imports anywhere in a file."""
    names = {module.name for module in modules()}
    waiting = {
        module.name: {
            found
            for target, _, _ in module.imports()
            if target.startswith("etude.")
            and (found := nearest(target.removeprefix("etude."), names))
            and found != module.name
        }
        for module in modules()
    }
    while free := {name for name, needs in waiting.items() if not needs & waiting.keys()}:
        waiting = {name: needs for name, needs in waiting.items() if name not in free}
    assert not waiting, f"in circles, or above one: {', '.join(sorted(waiting))}"


def nearest(target: str, names: set[str]) -> str:
    """The module that a dotted name belongs to."""
    while target and target not in names:
        target = target.rpartition(".")[0]
    return target


def test_what_is_imported_is_declared() -> None:
    """Every outside module of the tables is a dependency, pinned and with a range, and every
    declared dependency is used."""
    needed = set().union(*OUTSIDE.values())
    # one namespace, two packages
    needed = needed - {"arro3"} | {"arro3-core", "arro3-io"}
    pins = set(re.findall(r"^([\w-]+)==", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {re.split(r"[<>=]", dependency)[0] for dependency in project["dependencies"]}
    extras = {
        re.split(r"[<>=]", d)[0]
        for extra in project["optional-dependencies"].values()
        for d in extra
    }
    assert pins == ranges == needed - OPTIONAL - ELSEWHERE
    assert extras == OPTIONAL


def run_python(*argv: str) -> str:
    done = subprocess.run(
        [sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_stays_without_torch(name: str) -> None:
    assert run_python("-c", f"import sys, {name}; print('torch' in sys.modules)").strip() == "False"


def test_a_trainer_starts_without_a_compiler() -> None:
    """The compiler takes as long to load as torch, and imports Triton, which tests need to
    configure first."""
    script = (
        "import sys, torch, etude.trainer.trainer\n"
        "from etude.train.learner import Learner\n"
        "from etude.train.packing import TokenSequence\n"
        "from etude.model.transformer import init_from_scratch\n"
        "from tests.small_model import config\n"
        "lesson = [TokenSequence((5, 9, 20, 7), (True,) * 4)]\n"
        "Learner(init_from_scratch(config(), 0)).supervised_step(lesson, lr=1e-3)\n"
        "print(*{'torch._dynamo', 'triton'} & sys.modules.keys())"
    )
    assert run_python("-c", script).strip() == ""


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import runpy, sys\n"
        "sys.argv = ['etude', '--help']\n"
        "try:\n    runpy.run_module('etude', run_name='__main__')\n"
        "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'starlette', 'aiohttp', 'rich', 'obstore'}\n"
        "print('loaded:', *sorted(heavy & sys.modules.keys()))\n"
    )
    output = run_python("-c", script)
    assert "demo" in output
    assert output.splitlines()[-1].strip() == "loaded:"


def test_no_pickle() -> None:
    """Reading data from strangers never executes code."""
    refused = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    found = []
    for module in modules():
        found += [
            f"{module.path}:{line}"
            for target, _, line in module.imports()
            if target.split(".")[0] in refused
        ]
        found += [
            f"{module.path}:{line}"
            for target, _, line in module.imports()
            if target in ("torch.load", "torch.save")
        ]
        found += [
            f"{module.path}:{node.lineno}"
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save")
        ]
    assert not found


def test_types_are_decoded_where_threads_may_meet() -> None:
    """msgspec alone may crash the process: see store/decoding.py."""
    typed = re.compile(r"msgspec\.(convert|(json|msgpack)\.(Decoder|decode\(.*type=))")
    found = [
        f"{module.path}:{node.lineno}"
        for module in modules()
        if module.name != "store.decoding"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and typed.match(ast.unparse(node))
    ]
    assert not found


def swallows_everything(handler: ast.ExceptHandler) -> bool:
    """Cleaning up and raising the same error again does not count."""
    names = (
        {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
        if handler.type
        else {"Exception"}
    )
    last = handler.body[-1]
    return bool(names & {"Exception", "BaseException"}) and not (
        isinstance(last, ast.Raise) and last.exc is None
    )


def test_broad_excepts_are_few() -> None:
    found = [
        f"{module.path}:{node.lineno}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler) and swallows_everything(node)
    ]
    assert len(found) <= MAX_BROAD_EXCEPTS, found


def test_files_and_functions_are_short() -> None:
    long = []
    for module in modules():
        lines = len((ROOT / module.path).read_text().splitlines())
        if lines > MAX_FILE_LINES:
            long.append(f"{module.path}: {lines} lines")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                if size > MAX_FUNCTION_LINES:
                    long.append(f"{module.path}:{node.lineno}: {node.name} has {size} lines")
    assert not long, "\n".join(long)


def packages() -> set[str]:
    return {path.parent.name for path in PACKAGE.glob("*/*.py")}


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(m.path)
        for m in modules()
        if m.path.name != "__main__.py" and not ast.get_docstring(m.tree)
    ]
    assert not silent
    assert all((PACKAGE / name / "__init__.py").exists() for name in packages())


def test_docstrings_open_with_a_noun_phrase_or_an_imperative() -> None:
    """A clause such as "What is left of ..." makes the reader wait for its noun."""
    clauses = re.compile(r"(?:What|Who|Whoever|Whose|Whatever|Which|Where|Whether|How)\b")
    opened = []
    for path in sorted([*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))) if clauses.match(text.strip()):
                    opened.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text.splitlines()[0]}")
    assert not opened, "\n".join(opened)


def test_what_is_not_code_is_packaged() -> None:
    """A wheel contains only files that setuptools finds by the patterns in package-data."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    names = setuptools["package-data"]["*"]
    packages = [path.parent for path in PACKAGE.rglob("__init__.py")]
    packaged = {path for package in packages for name in names for path in package.glob(name)}
    code = {".py", ".pyc", ".c", ".h", ".so"}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in code}
    lost = sorted(str(path.relative_to(ROOT)) for path in files - packaged)
    assert not lost


def test_package_inits_hold_only_a_docstring() -> None:
    assert [
        str(m.path)
        for m in modules()
        if m.path.name == "__init__.py" and m.name and len(m.tree.body) != 1
    ] == []


@pytest.mark.parametrize("document", ["README.md", "docs/design.md"])
def test_the_tree_in_the_documents_is_the_tree(document: str) -> None:
    tree = re.search(r"^etude/\n(.*?)^\S", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)
    assert tree, f"{document} shows no package tree"
    assert set(re.findall(r"^  (\w+)/", tree[1], re.MULTILINE)) == packages()


@pytest.mark.parametrize(
    "document",
    sorted(str(p.relative_to(ROOT)) for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]),
)
def test_links_lead_somewhere(document: str) -> None:
    page = ROOT / document
    dead = []
    for path, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        target = page.parent / path if path else page
        if "://" in path or path.startswith("mailto:"):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(f"{path}#{anchor}")
    assert not dead


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = [title.replace("`", "").lower() for title in re.findall(r"^#+ (.+)$", text, re.M)]
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def test_pages_call_no_key_by_a_name_that_it_had_before() -> None:
    today = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/config.md").read_text(), re.MULTILINE))
    before = {key.rpartition(".")[2] for key in OLD_KEYS} - today
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]
    told = {
        f"{page.relative_to(ROOT)}: {key}"
        for page in pages
        if page.name not in ("CHANGELOG.md", "log.md")  # these describe earlier versions
        for key in re.findall(r"`(?:\w+\.)*(\w+) = [^`]+`", page.read_text())
        if key in before
    }
    assert not told


def test_the_readme_names_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    more = text[text.index("## More") :]
    pages = [str(page.relative_to(ROOT)) for page in [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")]]
    assert [page for page in pages if page != "README.md" and f"]({page})" not in more] == []


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/design.md"]
)
def test_what_the_documents_name_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:`|^)make ([a-z]+)", text, re.MULTILINE)) <= set(targets)
    files = re.findall(r"`((?:etude|examples|tests|docs|\.ci)/[\w/.]+)`", text)
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_the_commands_in_the_readme_exist() -> None:
    commands = re.findall(r"^etude (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands
    for command in sorted(set(commands)):
        run_python("-m", "etude", command, "--help")


def test_the_run_file_in_the_readme_is_valid() -> None:
    text = re.search(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert text
    assert [stage.kind for stage in parse(text[1]).stage] == ["midtrain", "sft", "rl"]


def test_the_run_files_in_the_page_on_stages_are_valid() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/stages.md").read_text(), re.DOTALL)
    kinds = [[stage.kind for stage in parse(block, ["name=x"]).stage] for block in blocks]
    assert kinds == [
        ["midtrain"],
        ["midtrain"],
        ["sft"],
        ["rl"],
        ["dpo"],
        ["distill"],
        ["midtrain", "sft", "rl", "dpo", "sft"],
    ]
