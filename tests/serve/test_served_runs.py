"""`etude serve` and `etude chat` with trained runs, and the log of requests."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.commands.serve import load
from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.model.files import hf_state_dict
from etude.serve.metrics import Metrics, RequestRecord
from etude.store.runs import Run
from tests.serve.conftest import Store
from tests.serve.serving import start, write_model

CPU = torch.device("cpu")
ASK = {"messages": [{"role": "user", "content": "read"}], "seed": 0}
LONG_TEXT = {"type": "string", "minLength": 100}
LONG = {"response_format": {"type": "json_schema", "json_schema": {"schema": LONG_TEXT}}}


def post(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as e:
        return e.code, json.load(e)


@pytest.mark.parametrize("version", [None, 0, 1])
def test_a_version_of_a_run_is_loaded(store: Store, tmp_path: Path, version: int | None) -> None:
    wanted = 2 if version is None else version
    for target in (str(tmp_path / "run"), store.url):
        loaded = load(target, "float32", CPU, version=version)
        assert (loaded.name, loaded.version) == ("run", wanted)
        expected = hf_state_dict(store.model(wanted), torch.float32)
        found = hf_state_dict(loaded.model, torch.float32)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_what_cannot_be_served_is_one_clear_message(store: Store, tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match="version 9 is not published; versions 0 to 2 exist"):
        load(store.url, None, CPU, version=9)
    model = write_model(tmp_path / "tiny")
    with pytest.raises(EtudeError, match="--version 1: .* is not a run"):
        load(str(model), None, CPU, version=1)
    (tmp_path / "begun" / "model").mkdir(parents=True)
    Run.open(f"file:{tmp_path}/begun").put_config(
        parse('name = "x"\n[[stage]]\nkind = "rl"\nsteps = 1\n')
    )
    with pytest.raises(EtudeError, match="holds no published weights"):
        load(str(tmp_path / "begun"), None, CPU)
    with pytest.raises(EtudeError, match="nowhere"):
        load(str(tmp_path / "nowhere"), None, CPU)


def test_a_run_is_served_and_its_requests_are_logged(store: Store, tmp_path: Path) -> None:
    child = start(tmp_path / "run", "--version", "1", "--default-max-tokens", "5")
    try:
        assert child.stdout is not None
        said = child.stdout.readline().strip()
        assert re.fullmatch(r"serving run \(version 1\) at http://127.0.0.1:\d+/v1", said), (
            child.communicate()
        )
        url = said.rpartition(" ")[2]
        status, answer = post(f"{url}/chat/completions", ASK | {"model": "run"} | LONG)
        usage, (choice,) = answer["usage"], answer["choices"]
        assert (status, usage["completion_tokens"], choice["finish_reason"]) == (200, 5, "length")
        assert [span["version"] for span in choice["weight_version"]] == [1]
        assert post(f"{url}/chat/completions", ASK | {"model": "gpt-4o"})[0] == 404
        child.terminate()
        loading, *lines = child.communicate()[1].splitlines()
        assert loading == f"loading {tmp_path / 'run'}", "which may take long"
    finally:
        child.kill()
        child.communicate()
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    for line, outcome in zip(lines, (f"200 {usage['prompt_tokens']}+5", "404 0+0"), strict=True):
        told = re.escape(f" POST /v1/chat/completions {outcome} tokens ")
        assert re.fullmatch(rf"{time}{told}\d+\.\d\d s", line)


def test_a_chat_with_a_version_of_a_run(store: Store, tmp_path: Path) -> None:
    options = ["--version", "0", "--max-tokens", "4", "--seed", "0"]
    argv = [sys.executable, "-m", "etude", "chat", str(tmp_path / "run"), *options]
    talked = subprocess.run(argv, input="hello\n", capture_output=True, text=True, check=False)
    assert talked.returncode == 0 and "tokens" in talked.stdout, talked.stderr
    assert f"talking to {tmp_path / 'run'}, version 0 " in talked.stdout
    assert talked.stderr == "", "the requests are not logged into the chat"
    argv[argv.index("0")] = "9"
    refused = subprocess.run(argv, input="", capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "version 9 is not published" in refused.stderr


def test_tokens_belong_to_the_request_that_is_answered() -> None:
    logged: list[RequestRecord] = []
    metrics = Metrics(logged.append)
    with metrics.answering(RequestRecord(method="POST", path="/a\x1b[2J")):
        metrics.count_tokens(3, 4)
    metrics.count_tokens(100, 100)  # outside of any request
    with metrics.answering(RequestRecord(method="GET", path="/b")):
        pass
    first, second = logged
    assert (first.prompt_tokens, first.answer_tokens, second.prompt_tokens) == (3, 4, 0)
    assert str(first).startswith("POST /a?[2J 499 3+4 tokens"), "nothing steers the terminal"
