"""The requests that are sent to vLLM. Runs without vLLM."""

from __future__ import annotations

from dataclasses import fields, replace

from etude.core.sampling import Request, Sample, SamplingParams, Token, VersionSpan
from etude.serve.vllm import finished_already, generate_request, with_begun


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


def test_an_answer_that_was_begun_goes_on_behind_it() -> None:
    begun = (Token(7, -0.5, 3, ((7, -0.5),)), Token(8, -0.25, 4, ((8, -0.25),)))
    request = Request(
        prompt=(5, 6), max_tokens=3, seed=0, stop_token_ids=(1,), top_logprobs=1, begun=begun
    )
    sent = generate_request(request, version=4)
    assert sent["token_ids"] == (5, 6, 7, 8) and sent["sampling_params"]["max_tokens"] == 1
    rest = Sample(
        tokens=(9,), logprobs=(-1.0,), versions=(VersionSpan(4, 1),), finish_reason="length",
        top_logprobs=(((9, -1.0),),),
    )  # fmt: skip
    whole = with_begun(request, rest)
    assert (whole.tokens, whole.logprobs) == ((7, 8, 9), (-0.5, -0.25, -1.0))
    assert whole.versions == (VersionSpan(3, 1), VersionSpan(4, 2))
    assert whole.top_logprobs == (((7, -0.5),), ((8, -0.25),), ((9, -1.0),))
    assert finished_already(request) is None
    assert finished_already(replace(request, max_tokens=2)) == "length"
    assert finished_already(replace(request, stop_token_ids=(8,))) == "stop"
    assert finished_already(replace(request, begun=())) is None
