"""The jukebox of service.py in the other direction: it asks the gateway of a run for sessions.

ETUDE_TOKEN=.. python examples/by_url/scheduler.py http://127.0.0.1:8100
"""

from __future__ import annotations

import os
import sys
import threading
import time
import urllib.error
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parents[1] / "clients" / "python")]

from etude_environment import pull  # noqa: E402
from service import rollout  # noqa: E402


def work(gateway: str) -> None:
    while True:
        try:
            pull(gateway, os.environ["ETUDE_TOKEN"], rollout)
        except (urllib.error.URLError, OSError):  # the gateway is not up yet, or not any more
            time.sleep(1.0)


if __name__ == "__main__":
    threads = [threading.Thread(target=work, args=(sys.argv[1],)) for _ in range(16)]
    for thread in threads:
        thread.start()
