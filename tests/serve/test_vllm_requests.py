"""What is sent on to vLLM. It needs no vLLM."""

from __future__ import annotations

from dataclasses import fields

from etude.core.sampling import Request, SamplingParams
from etude.serve.vllm import generate_request


def test_every_sampling_parameter_is_passed_on_by_its_name() -> None:
    params = SamplingParams(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.2)
    request = Request(
        prompt=(5, 6), max_tokens=3, seed=11, params=params, stop_token_ids=(1, 2), top_logprobs=2
    )
    sent = generate_request(request, version=4)
    assert (sent["token_ids"], sent["cache_salt"]) == ((5, 6), "version-4")
    told = sent["sampling_params"]
    names = {field.name for field in fields(params)} - {"grammar"}
    assert {name: told[name] for name in names} == {name: getattr(params, name) for name in names}
    assert {name: told[name] for name in told.keys() - names} == {
        "max_tokens": 3, "seed": 11, "stop_token_ids": (1, 2), "ignore_eos": True, "logprobs": 2,
        "detokenize": False,
    }  # fmt: skip
