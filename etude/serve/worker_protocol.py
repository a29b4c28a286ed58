"""The protocol between gateway and worker, and the model files that both read from the run's
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
    """The body of `POST /generate`, in MessagePack. The answer is a `core.sampling.Sample`; or,
    with `stream`, frames of one."""

    request: Request
    min_weight_version: int
    """A worker with older weights refuses (503). So the gateway's promise holds even if its view of
    a worker is wrong."""
    stream: bool = False


FRAME_SIZE_BYTES = 4


class GenerateFrame(msgspec.Struct, omit_defaults=True):
    """A part of a stream, in MessagePack with its size in front. It holds a token, the sample, or
    an error."""

    token: Token | None = None
    sample: Sample | None = None
    """Comes last."""
    status: int = 0
    error: str = ""
    """An error after the first token, with the status that HTTP would have used."""

    def packed(self) -> bytes:
        data = msgspec.msgpack.encode(self)
        return len(data).to_bytes(FRAME_SIZE_BYTES) + data


class FrameReader:
    """Splits the bytes of a stream into frames as they arrive."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def push(self, data: bytes) -> Iterator[GenerateFrame]:
        # Grown in place: the routed experts of a long context are one frame of megabytes.
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
    """The quarantined regions, which are sent no requests; None leaves them unchanged. Only
    gateways get this field."""


class JoinRequest(msgspec.Struct):
    url: str
    region: str
    version: int
    pool: str = ""
    """The pool that the worker belongs to (`serve.pools`)."""
    users_only: bool = False
    """The worker lends nothing to RL now, so a gateway of rollouts sends it no requests."""


class DrainRequest(msgspec.Struct):
    """The body of `POST /workers/drain`."""

    url: str
    draining: bool = True
    """False ends the draining."""
    keep: int = 0
    """Number of workers that must be left to answer; otherwise the request is refused (409)."""


class WorkerStatus(msgspec.Struct):
    region: str
    version: int
    running: int
    waiting: int
    busy_s: float
    """Time in engine steps since the worker began. Its growth divided by that of `wall_s` is the
    utilisation."""
    wall_s: float
    tokens: int
    store: list[StoreUsed] = []
    """Each worker's traffic with the run's store, if that is a bucket."""

    def joined_with(self, other: WorkerStatus) -> WorkerStatus:
        """Two workers as one; its version is the older of the two."""
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
    at the time of the request."""

    region: str
    version: int
    root: str
    pauses_s: list[float]
    """Time that each of the latest weight swaps stopped the engine."""


def read_model_files(run: Run) -> dict[str, bytes]:
    """The files of a run's model, with the context length that the run sets."""
    files = run.model_files()
    if missing := [name for name in MODEL_FILES if name not in files]:
        raise EtudeError(
            f"{run.objects.url} has no model to serve ({', '.join(missing)} missing): start a "
            f"run there first"
        )
    return cut_context(files, run.config().model.max_context)
