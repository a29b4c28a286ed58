"""Figures about a server in the text format of Prometheus."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Metrics:
    def __init__(self) -> None:
        self.started = int(time.time())
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds = [0] * (len(BOUNDS_S) + 1)
        self._total_s = 0.0
        self._prompt_tokens = self._sampled_tokens = 0

    def count_tokens(self, prompt: int, sampled: int) -> None:
        self._prompt_tokens += prompt
        self._sampled_tokens += sampled

    def count_request(self, route: str, status: int, seconds: float) -> None:
        self._requests[route, status] += 1
        self._seconds[bisect_left(BOUNDS_S, seconds)] += 1
        self._total_s += seconds

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
