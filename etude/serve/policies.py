"""Policies: which scope of a token opens which route. A route that has no row here is not served:
`create_app` refuses to start.

An admin's token opens everything. The tokens of a session open a route with `{session}` in it only
for their own session. HEAD is as GET.
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
"""Whose requests say themselves how urgent they are. An agent is not among them: it would overtake
the people who wait, and the other attempts of its group."""

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
"""Those of every dialect, alone and within a session."""

POLICIES: Mapping[tuple[str, str], Policy] = {
    **dict.fromkeys(CONVERSATIONS, USER),
    # A harness has no way to the model that is not recorded, cannot undo what was recorded, and
    # cannot say what it was worth.
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
    """Of a route, by its pattern."""
    try:
        return POLICIES["GET" if method == "HEAD" else method, path]
    except KeyError:
        raise EtudeError(
            f"{method} {path} has no policy: say who may use it, by a row of POLICIES in "
            f"etude/serve/policies.py"
        ) from None
