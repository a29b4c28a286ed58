"""Records in a growing file: the remains of a killed writer, and damage."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from etude.store.frames import DamagedFrame, read_frames, to_frame

RECORDS = (b"first", b"", b"the third one")
FRAMES = [to_frame(record) for record in RECORDS]
DATA = b"".join(FRAMES)


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_records_come_back_in_their_order(records: list[bytes]) -> None:
    assert list(read_frames(b"".join(map(to_frame, records)))) == records


def test_an_end_that_is_half_written_is_no_damage() -> None:
    ends = [len(b"".join(FRAMES[:count])) for count in range(4)]
    for cut in range(len(DATA) + 1):
        whole = sum(end <= cut for end in ends) - 1
        assert list(read_frames(DATA[:cut])) == list(RECORDS[:whole])


def test_every_flipped_bit_is_told_with_its_place() -> None:
    places = [0, len(FRAMES[0]), len(FRAMES[0] + FRAMES[1])]
    for byte in range(len(DATA)):
        number = sum(place <= byte for place in places) - 1
        flipped = bytearray(DATA)
        flipped[byte] ^= 4
        found = list(read_frames(bytes(flipped)))
        assert found[: number + 1] == [*RECORDS[:number], DamagedFrame(places[number])]
        is_size = byte - places[number] < 8
        # after a frame of unknown size the next one cannot be found
        assert found[number + 1 :] == ([] if is_size else list(RECORDS[number + 1 :]))
