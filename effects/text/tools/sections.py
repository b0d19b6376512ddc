"""The loop that all formats with markers share: text, a group of calls, text."""

from collections.abc import Callable, Sequence
from typing import Final

from minfer.effects.text.tools.calls import take_after_call
from minfer.effects.text.tools.delta_writer import DeltaWriter
from minfer.effects.text.tools.source import Reading, StreamedText, take_until

Body = Callable[[str], Reading[bool]]
# Characters of an answer that are read a second time, or more often: wrong text after a
# call may begin a call at each of many markers, and each may reach to the end.
_MAX_REREAD_CHARS: Final = 1 << 18


def sections(
    source: StreamedText,
    out: DeltaWriter,
    opens: Sequence[str],
    body: Body,
    *,
    closes: Sequence[str] = (),
    drops: Sequence[str] = (),
    strays: bool = True,
) -> Reading[None]:
    """Read the rest of an answer.

    `body` takes the text after a marker of `opens`, which it gets; it returns whether all
    of it was calls. If not, the source keeps what belongs to none, which stays text.
    Markers of `closes` that come once more after a call, and those of `drops`, are left
    out; and so are `strays`, brackets that close nothing, after a wrong call.
    """
    marker = ""
    num_reread = 0
    outside = [*opens, *drops]
    while marker := marker or (yield from take_until(source, outside, out.content)):
        if marker not in opens:
            out.mark()
            marker = ""
            continue
        source.keep(marker)
        before = out.calls
        complete = yield from body(marker)
        # Without streaming, a call that goes wrong is text up to there.
        wrong, left = source.take_settled(), source.take_kept()
        marker = ""
        called = out.calls > before
        outside = [*opens, *drops, *(closes if called else ())]
        if complete:
            continue
        out.content(wrong)
        if not (called or wrong) or num_reread > _MAX_REREAD_CHARS:
            out.content(left)
            continue
        num_reread += len(left)
        if called:
            marker = yield from take_after_call(
                source, out, left, [*opens, *closes], strays=strays
            )
        else:
            source.put_back(left)
