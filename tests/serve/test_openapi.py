"""Requests made up from the server's own description of itself: none breaks it, and every answer is
as described."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from tests.serve.serving import serving, write_model

CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]
OPERATIONS = 13  # schemathesis leaves out the document itself


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    # So little room that any answer is a short one.
    with serving(
        write_model(tmp_path_factory.mktemp("openapi") / "tiny"), "--max-context", "12"
    ) as url:
        yield url


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_the_server_is_as_it_describes_itself(url: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == OPERATIONS
    for operation in operations:
        if operation.method == "post" or mode == GenerationMode.POSITIVE:
            try_out(operation, mode)


def try_out(operation: Any, mode: GenerationMode) -> None:
    everything = list(HealthCheck)

    @settings(
        max_examples=20 if operation.method == "post" else 3,
        suppress_health_check=everything,
        database=None,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def tried(case: Any) -> None:
        case.call_and_validate(checks=CHECKS)

    tried()
