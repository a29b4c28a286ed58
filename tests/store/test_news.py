"""Users with recent activity: each is reported once to every reader, and old news is swept."""

from __future__ import annotations

import pytest

from etude.store.news import CLOCK_SKEW_S, KEPT_S, LIST_ALL_S, NEWS, News
from etude.store.objects import Objects
from tests.store.test_production_store import Clock

ALICE, BOB, CAROL = "a" * 32, "b" * 32, "c" * 32


@pytest.fixture
def clock() -> Clock:
    clock = Clock()
    clock.now = 1_000_000.0
    return clock


@pytest.fixture
def objects() -> Objects:
    return Objects.open("memory:")


@pytest.fixture
def news(objects: Objects, clock: Clock) -> News:
    return News(objects, clock)


def test_each_is_told_once_to_every_reader(objects: Objects, clock: Clock, news: News) -> None:
    reader, other = News(objects, clock), News(objects, clock)
    news.tell(ALICE)
    assert reader.read() is None, "it has not read before: all users may have done something"
    assert reader.read() == set(), "what was there then is not told again"
    for user in (ALICE, BOB, BOB):
        news.tell(user)
    assert reader.read() == {ALICE, BOB}
    clock.now += 1
    assert reader.read() == set()
    assert other.read() is None


def test_what_writers_with_other_clocks_tell_is_read(
    objects: Objects, clock: Clock, news: News
) -> None:
    """News of another ten-minute folder is read, too."""
    behind, ahead = Clock(), Clock()
    news.read()
    for _ in range(20):
        clock.now += 61.0
        behind.now = clock.now - CLOCK_SKEW_S + 1
        ahead.now = clock.now + CLOCK_SKEW_S - 1
        News(objects, behind).tell(ALICE)
        News(objects, ahead).tell(BOB)
        assert news.read() == {ALICE, BOB}
        assert news.read() == set()


@pytest.mark.parametrize("every_s", [5.0, LIST_ALL_S, 2 * KEPT_S])
def test_a_reader_lists_all_users_every_hour(clock: Clock, news: News, every_s: float) -> None:
    """However often it reads, because some news may be missing: that of a writer that died, or
    swept news."""
    assert news.read() is None
    for _ in range(int(LIST_ALL_S // every_s)):
        clock.now += every_s
        news.tell(ALICE)
        assert news.read() == {ALICE}
    clock.now += every_s
    news.tell(BOB)
    assert news.read() is None
    assert news.read() == set()


def test_a_clock_that_is_put_back_hides_nothing(clock: Clock, news: News) -> None:
    news.read()
    clock.now -= 10 * LIST_ALL_S
    news.tell(ALICE)
    assert news.read() is None
    news.tell(BOB)
    assert news.read() == {ALICE, BOB}, "what was told around then is told again"


def test_keys_of_others_are_no_news(objects: Objects, clock: Clock, news: News) -> None:
    news.read()
    time_ms = int(clock.now * 1000)
    objects.put(f"{NEWS}/{time_ms // 600_000}/{time_ms:013d}-somebody", b"")
    assert news.read() == set()


def test_who_is_forgotten_is_named_nowhere(objects: Objects, clock: Clock, news: News) -> None:
    news.read()
    for user in (ALICE, BOB, ALICE):
        news.tell(user)
    clock.now += 1000
    news.tell(ALICE)
    news.forget(ALICE)
    assert news.read() == {BOB}
    assert not [key for key in objects.list(NEWS) if ALICE in key]


def test_old_news_is_swept_and_the_rest_stays(objects: Objects, clock: Clock, news: News) -> None:
    news.tell(ALICE)
    clock.now += KEPT_S - 60
    news.tell(BOB)
    news.sweep()
    assert len(objects.list(NEWS)) == 2, "a reader may still come for it"
    clock.now += 700  # folders are swept whole
    objects.put(f"{NEWS}/notes/mine", b"")
    news.sweep()
    left = objects.list(NEWS)
    assert len(left) == 2 and not any(ALICE in key for key in left)


def test_entries_lie_where_readers_of_other_versions_look(objects: Objects, clock: Clock) -> None:
    clock.now = 1_700_000_000.25
    News(objects, clock).tell(ALICE)
    (key,) = objects.list(NEWS)
    assert key.startswith(f"production/news/2833333/1700000000250-{ALICE}-")
