"""Requests generated from the server's OpenAPI document: none of them breaks the server, and every
answer matches the document."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from etude.serve.process import authorization
from etude.serve.shards import DESK
from etude.serve.tokens import Scope, TokenAuthority
from tests.serve.conftest import Store
from tests.serve.serving import serving, write_model
from tests.serve.test_processes import SECRET, Processes
from tests.serve.test_processes import url as url_of

SMALL = {"max_position_embeddings": 12}

CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]
OPERATIONS = 13  # schemathesis leaves out the document itself
DESK_OPERATIONS = 5  # of a gateway
TELLING = ("post", "put")
MANY = 100
"""Requests per operation: generating one takes far longer than answering it."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    # So short a context that every answer is short.
    with serving(
        write_model(tmp_path_factory.mktemp("openapi") / "tiny"), "--max-context", "12"
    ) as url:
        yield url


MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [8, pytest.param(MANY, marks=pytest.mark.schema)])
def test_the_server_is_as_it_describes_itself(url: str, mode: GenerationMode, count: int) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for operation in operations(schema, mode, OPERATIONS):
        try_out(operation, mode, count, lambda case: case.call_and_validate(checks=CHECKS))


def operations(schema: Any, mode: GenerationMode, count: int) -> list[Any]:
    """The operations with requests in this mode: without parameters, none can be invalid."""
    found = [each.ok() for each in schema.get_all_operations()]
    assert len(found) == count
    return [each for each in found if each.method in TELLING or mode == GenerationMode.POSITIVE]


@pytest.mark.schema
@pytest.mark.parametrize("mode", MODES)
def test_no_request_breaks_a_gateway(tmp_path: Path, mode: GenerationMode) -> None:
    """Neither outside of sessions, nor in one, nor at the desk, each with the right token."""
    authority, processes = TokenAuthority(SECRET), Processes(Store(tmp_path, **SMALL))
    tokens = {scope: authority.mint(scope, "x", 86400.0) for scope in Scope}
    try:
        gateway = url_of(processes.start("etude.serve.gateway", ETUDE_SECRET=SECRET))
        where = ("--region", "east", "--gateway", gateway, "--version", "0")
        processes.start("etude.serve.worker", *where, ETUDE_TOKEN=tokens[Scope.WORKER])
        admin = authorization(tokens[Scope.ADMIN])
        requests.get(f"{gateway}/up", headers=admin, timeout=600).raise_for_status()
        schema = schemathesis.openapi.from_url(f"{gateway}/openapi.json", headers=admin)
        speaking = ((gateway, Scope.USER), (f"{gateway}/s/x", Scope.SESSION))
        for operation in operations(schema, mode, OPERATIONS + DESK_OPERATIONS):
            if operation.path.startswith(DESK):
                try_out(operation, mode, MANY, lambda case: ask_the_desk(case, gateway, admin))
                continue
            for base, scope in speaking:
                headers = authorization(tokens[scope])

                def call(case: Any, base: str = base, headers: Any = headers) -> None:
                    response = case.call(base_url=base, headers=headers)
                    case.validate_response(response, checks=[not_a_server_error])

                try_out(operation, mode, MANY, call)
    finally:
        for child in processes.running:
            child.kill()
            child.communicate()


def ask_the_desk(case: Any, gateway: str, headers: dict[str, str]) -> None:
    """Do not wait for sessions, since nobody offers any."""
    for said in (case.body, case.query):
        if isinstance(said, dict) and isinstance(said.get("wait_s"), int | float):
            said["wait_s"] = min(said["wait_s"], 0.0)
    response = case.call(base_url=gateway, headers=headers)
    case.validate_response(response, checks=CHECKS)


def try_out(operation: Any, mode: GenerationMode, count: int, call: Callable[[Any], None]) -> None:
    everything = list(HealthCheck)

    @settings(
        max_examples=count if operation.method in TELLING else 3,
        suppress_health_check=everything,
        database=None,
        deadline=None,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def tried(case: Any) -> None:
        call(case)

    tried()
