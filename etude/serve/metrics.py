"""Metrics of a server in the text format of Prometheus, and a record of each request."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request while it is answered, as the log shows it."""

    method: str
    path: str
    route: str = "none"
    """The name of the handler; "none" for a path that is not served."""
    status: int = 499  # remains if the client goes away before an answer
    prompt_tokens: int = 0
    answer_tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        path = "".join(c if c.isprintable() else "?" for c in self.path)
        return (
            f"{self.method} {path} {self.status} {self.prompt_tokens}+{self.answer_tokens} tokens "
            f"{self.seconds:.2f} s"
        )


_answered: ContextVar[RequestRecord | None] = ContextVar("_answered", default=None)


class Metrics:
    def __init__(self, log: Callable[[RequestRecord], None] = lambda record: None) -> None:
        """`log` is called with each request after it has been answered."""
        self.started = int(time.time())
        self._log = log
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds = [0] * (len(BOUNDS_S) + 1)
        self._total_s = 0.0
        self._prompt_tokens = self._sampled_tokens = 0

    def count_tokens(self, prompt: int, sampled: int) -> None:
        """Count the tokens of the request that is being answered."""
        self._prompt_tokens += prompt
        self._sampled_tokens += sampled
        if (record := _answered.get()) is not None:
            record.prompt_tokens += prompt
            record.answer_tokens += sampled

    @contextmanager
    def answering(self, record: RequestRecord) -> Iterator[None]:
        began, before = time.monotonic(), _answered.set(record)
        try:
            yield
        finally:
            _answered.reset(before)
            record.seconds = time.monotonic() - began
            self._requests[record.route, record.status] += 1
            self._seconds[bisect_left(BOUNDS_S, record.seconds)] += 1
            self._total_s += record.seconds
            self._log(record)

    def text(self, gauges: Mapping[str, float]) -> str:
        lines = ["# TYPE etude_requests_total counter"]
        for (route, status), count in sorted(self._requests.items()):
            lines.append(f'etude_requests_total{{route="{route}",status="{status}"}} {count}')
        lines.append("# TYPE etude_request_seconds histogram")
        below = 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self._seconds, strict=True):
            below += count
            lines.append(f'etude_request_seconds_bucket{{le="{bound}"}} {below}')
        lines += [
            f"etude_request_seconds_sum {self._total_s}",
            f"etude_request_seconds_count {below}",
        ]
        counters = {"prompt_tokens": self._prompt_tokens, "sampled_tokens": self._sampled_tokens}
        for name, value in counters.items():
            lines += [f"# TYPE etude_{name}_total counter", f"etude_{name}_total {value}"]
        for name, now in gauges.items():
            lines += [f"# TYPE etude_{name} gauge", f"etude_{name} {now}"]
        return "\n".join(lines) + "\n"
