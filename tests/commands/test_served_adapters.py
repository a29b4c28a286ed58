"""`etude serve --adapter`: the model that a request names chooses the adapter."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
import torch

from etude.commands.serve import (
    Options,
    create_server,
    load,
    make_engine,
    no_other_version,
    read_adapters,
)
from etude.core.errors import EtudeError
from etude.model.files import hf_state_dict, write_directory
from etude.model.lora import write_adapter
from etude.model.transformer import ModelConfig
from etude.serve import process
from etude.serve.engine_thread import EngineThread
from tests.adapters_of import random_adapter
from tests.serve.client import post
from tests.small_model import sharp, small_files


@pytest.mark.filterwarnings("ignore:native.c")
async def test_the_name_of_the_model_chooses_the_adapter(tmp_path: Path) -> None:
    files = small_files()
    shape = ModelConfig.from_json(files["config.json"])
    write_directory(tmp_path / "base", files, hf_state_dict(sharp(shape, 0)))
    for seed in (1, 2):
        write_adapter(tmp_path / str(seed), random_adapter(shape, seed), base="")
    options = Options(
        target=str(tmp_path / "base"), version=None, host="127.0.0.1", port=0, name=None,
        adapter=[f"shop={tmp_path / '1'}", f"team/a b={tmp_path / '2'}"], token_file=None,
        max_num_seqs=4, max_answers=8, max_context=None, default_max_tokens=8, dtype="float32",
        threads=None, device="cpu", invariant=False, quantization=None,
        kv_cache_dtype="auto", quiet=True,
    )  # fmt: skip
    loaded = load(options.target, options.dtype, torch.device("cpu"))
    adapters = read_adapters(options.adapter)
    engine = EngineThread(make_engine(loaded, adapters, options), no_other_version, files)
    with pytest.raises(EtudeError, match="--adapter shop: this is the name of the model itself"):
        create_server(engine, files, "shop", None, options, tuple(adapters))
    server = create_server(engine, files, loaded.name, None, options, tuple(adapters))
    listener = process.bind("127.0.0.1", 0, None)
    url, names = f"{process.url_of(listener)}/v1", ["base", *adapters]
    said: dict[str, set[str]] = {name: set() for name in names}
    chat = {"messages": [{"role": "user", "content": "hello there"}], "temperature": 0}
    asks = (
        ("completions", {"prompt": "hello there", "temperature": 0, "max_tokens": 8}),
        ("chat/completions", chat),
        ("responses", {"input": "hello there", "temperature": 0}),
        ("messages", chat | {"max_tokens": 8}),
    )
    async with process.serving(server, listener), aiohttp.ClientSession() as http:
        async with http.get(f"{url}/models") as response:
            assert [card["id"] for card in (await response.json())["data"]] == names
        for path, body in asks:
            for name in (*names, *names):
                answer = await post(http, f"{url}/{path}", {**body, "model": name})
                assert answer["model"] == name
                told = answer.get("choices") or answer.get("output") or answer["content"]
                said[name].add(f"{path} {_text(told)}")
        async with http.post(f"{url}/completions", json={"model": "no", "prompt": "x"}) as refused:
            assert refused.status == 404
    engine.close()
    assert all(len(each) == len(asks) for each in said.values())
    assert len(set.union(*said.values())) == len(asks) * len(names), "each has words of its own"


def _text(told: list[dict[str, object]]) -> str:
    """The text of an answer, without ids that differ between answers."""
    first = told[0]
    return str(first.get("text") or first.get("message") or first.get("content"))
