"""An answer as reasoning, content and calls, whole or streamed: the events that every dialect is
written from. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from etude.core.sampling import Request, Sample, Token
from etude.core.seeds import derive
from etude.model.output_parser import Content, Event, Reasoning, with_ids
from etude.model.tokenizer import ChatTokenizer, Tool


class AnswerReader:
    """Events of one answer as its tokens arrive. Every call has an id, which is the same each time
    the answer is read. `tools` is None if text that looks like a call is to stay text."""

    def __init__(
        self, tokenizer: ChatTokenizer, request: Request, tools: Sequence[Tool] | None
    ) -> None:
        self._request = request
        self._call_ids: set[str] = set()
        self._said: list[Event] = []
        self._last: list[Event] | None = None
        self._has_begun = False
        self._parser = tokenizer.answer_parser(
            request.prompt, tools, stop_token_ids=request.stop_token_ids, stop=request.stop
        )

    def push(self, event: Token | Sample) -> list[Event]:
        """Events of one token, or the last ones of a sample. The sample may be pushed again."""
        if isinstance(event, Token):
            self._has_begun = True
            events = self._parser.push(event.token)
            if events:
                events = self._with_ids(events)
                self._said += events
            return events
        if self._last is None:
            finished = event.finish_reason == "stop"
            self._last = self._with_ids(self._parser.end(finished=finished))
        return self._last

    def whole(self, sample: Sample) -> list[Event]:
        """All events of a sample whose tokens were either all pushed or not pushed at all. A second
        call returns the same events without parsing again."""
        if not self._has_begun:
            self._has_begun = True
            self._said += self._with_ids(self._parser.extend(sample.tokens))
        return joined([*self._said, *self.push(sample)])

    def _with_ids(self, events: list[Event]) -> list[Event]:
        return with_ids(events, self._call_id, self._call_ids)

    def _call_id(self, number: int) -> str:
        return f"call_{derive(self._request.seed, len(self._request.prompt), number):x}"


def joined(events: Iterable[Event]) -> list[Event]:
    """Merge neighbouring texts of one kind."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + event.text)
        else:
            found.append(event)
    return found
