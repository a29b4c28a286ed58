"""Policies: the token scopes that may use each route. A route without a row here is not served:
`create_app` refuses to start.

An admin's token permits everything. The tokens of a session permit routes with `{session}` in them
only for their own session. HEAD is treated as GET.
"""

from __future__ import annotations

from collections.abc import Mapping

from etude.core.errors import EtudeError
from etude.serve.tokens import Scope

Policy = frozenset[Scope]

ADMIN: Policy = frozenset({Scope.ADMIN})
SESSION: Policy = frozenset({Scope.SESSION, Scope.ADMIN})
SCORE: Policy = frozenset({Scope.SCORE, Scope.ADMIN})
USER: Policy = frozenset({Scope.USER, Scope.ADMIN})
WORKER: Policy = frozenset({Scope.WORKER, Scope.ADMIN})
FEEDBACK: Policy = frozenset({Scope.FEEDBACK, Scope.USER, Scope.ADMIN})
SCHEDULER: Policy = frozenset({Scope.SCHEDULER, Scope.ADMIN})
ANY: Policy = frozenset(Scope)

MAY_CHOOSE_PRIORITY: Policy = USER
"""Scopes whose requests may set their own priority. Agents are not among them: they would overtake
people who wait, and the other attempts of their group."""

CONVERSATIONS = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("GET", "/v1/responses/{response}"),
    ("DELETE", "/v1/responses/{response}"),
    ("GET", "/v1/responses/{response}/input_items"),
    ("POST", "/v1/responses/{response}/cancel"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
)
"""Routes of all dialects, outside and inside a session."""

POLICIES: Mapping[tuple[str, str], Policy] = {
    **dict.fromkeys(CONVERSATIONS, USER),
    # A harness cannot reach the model without being recorded, cannot undo what was recorded, and
    # cannot set its own score.
    **{(method, "/s/{session}" + path): SESSION for method, path in CONVERSATIONS},
    ("GET", "/s/{session}/segments"): ADMIN,
    ("GET", "/s/{session}/disturbed"): ADMIN,
    ("DELETE", "/s/{session}"): ADMIN,
    ("POST", "/v1/feedback"): FEEDBACK,
    ("POST", "/v1/consent"): USER,
    ("DELETE", "/v1/users"): USER,
    ("POST", "/v1/sessions"): SCHEDULER,
    ("POST", "/v1/sessions/{session}/score"): SCORE,
    ("PUT", "/v1/sessions/{session}"): ADMIN,
    ("GET", "/v1/sessions/{session}"): ADMIN,
    ("DELETE", "/v1/sessions/{session}"): ADMIN,
    ("POST", "/v1/completions"): USER,
    ("GET", "/v1/models"): ANY,
    ("GET", "/v1/models/{model:path}"): ANY,
    ("GET", "/health"): ANY,
    ("GET", "/openapi.json"): ANY,
    ("GET", "/metrics"): ADMIN,
    ("POST", "/workers"): WORKER,
    ("POST", "/workers/drain"): ADMIN,
    ("POST", "/generate"): WORKER,
    ("GET", "/shards/{epoch:int}/{version:int}/{hash}"): WORKER,
    ("POST", "/load"): ADMIN,
    ("GET", "/up"): ADMIN,
    ("GET", "/status"): ADMIN,
    ("GET", "/weights"): ADMIN,
    ("POST", "/tokens"): ADMIN,
    ("DELETE", "/tokens/{id}"): ADMIN,
}


def policy_of(method: str, path: str) -> Policy:
    """The policy of a route, by its pattern."""
    try:
        return POLICIES["GET" if method == "HEAD" else method, path]
    except KeyError:
        raise EtudeError(
            f"{method} {path} has no access policy: add a row to POLICIES in "
            f"etude/serve/policies.py"
        ) from None
