"""The protocol between gateway and worker, and the model's files that both read from the run's
store."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from etude.core.errors import EtudeError
from etude.core.events import StoreUsed
from etude.core.sampling import Request, Sample, Token
from etude.model.directory import MODEL_FILES, cut_context
from etude.store.decoding import decode_msgpack
from etude.store.runs import Run


class GenerateRequest(msgspec.Struct):
    """The body of `POST /generate`, in MessagePack; the answer is a `core.sampling.Sample`, or
    frames of one with `stream`."""

    request: Request
    min_weight_version: int
    """A worker with older weights refuses (503): what the gateway promised holds even if it is
    wrong about a worker."""
    stream: bool = False


FRAME_SIZE_BYTES = 4


class GenerateFrame(msgspec.Struct, omit_defaults=True):
    """A part of a stream: in MessagePack, its size before it. One of these."""

    token: Token | None = None
    sample: Sample | None = None
    """The last."""
    status: int = 0
    error: str = ""
    """What went wrong behind the first token, as HTTP would have said it."""

    def packed(self) -> bytes:
        data = msgspec.msgpack.encode(self)
        return len(data).to_bytes(FRAME_SIZE_BYTES) + data


class FrameReader:
    """The frames of a stream, from its bytes as they come."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def push(self, data: bytes) -> Iterator[GenerateFrame]:
        # grown in place: the experts of a long context are one frame of megabytes
        rest, begin = self._rest, 0
        rest += data
        while begin + FRAME_SIZE_BYTES <= len(rest):
            end = begin + FRAME_SIZE_BYTES
            end += int.from_bytes(rest[begin:end])
            if end > len(rest):
                break
            yield decode_msgpack(rest[begin + FRAME_SIZE_BYTES : end], GenerateFrame)
            begin = end
        del rest[:begin]


class LoadRequest(msgspec.Struct):
    version: int
    quarantined: list[str] | None = None
    """Regions that are to be sent nothing, and no others; None: as before. Only a gateway is told
    so."""


class JoinRequest(msgspec.Struct):
    url: str
    region: str
    version: int
    pool: str = ""
    """That it stands in (`serve.pools`)."""
    users_only: bool = False
    """It lends nothing now: a gateway of rollouts sends it none."""


class DrainRequest(msgspec.Struct):
    """The body of `POST /workers/drain`."""

    url: str
    draining: bool = True
    """False: it is wanted again."""
    keep: int = 0
    """It is refused (409) if fewer workers than that would be left to answer."""


class WorkerStatus(msgspec.Struct):
    region: str
    version: int
    running: int
    waiting: int
    busy_s: float
    """Time in engine steps since the worker began; its growth over the growth of `wall_s` is how
    busy it is."""
    wall_s: float
    tokens: int
    store: list[StoreUsed] = []
    """What each worker has asked of the run's store, if that is a bucket."""

    def joined_with(self, other: WorkerStatus) -> WorkerStatus:
        """Two workers as if they were one; of the versions, what both are at least at."""
        return WorkerStatus(
            region=self.region,
            version=min(self.version, other.version),
            running=self.running + other.running,
            waiting=self.waiting + other.waiting,
            busy_s=self.busy_s + other.busy_s,
            wall_s=self.wall_s + other.wall_s,
            tokens=self.tokens + other.tokens,
            store=self.store + other.store,
        )


class WorkerWeights(msgspec.Struct):
    """Proof of the weights that a worker computes with: the root is derived from its live tensors
    when it is asked."""

    region: str
    version: int
    root: str
    pauses_s: list[float]
    """Of the last swaps, each: how long the engine stood still."""


def read_model_files(run: Run) -> dict[str, bytes]:
    """Of the model of a run, with the context that the run gives it."""
    files = run.model_files()
    if missing := [name for name in MODEL_FILES if name not in files]:
        raise EtudeError(
            f"{run.objects.url} holds no model to serve, {', '.join(missing)} missing: start a run "
            f"there first"
        )
    return cut_context(files, run.config().model.max_context)
