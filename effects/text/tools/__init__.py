"""The parts of an output that are no content: tool calls, and reasoning.

Models are trained to write both into their text, between markers, each family in a format
of its own. A parser takes the text as it comes and separates content, reasoning and
calls:

    text ---> Source ---> a format's reader ---> DeltaWriter ---> deltas

A reader is a generator: it is written as if the whole text were there, takes characters
one after the other, and yields where there are none yet. So its result does not depend on
how the text is cut. Text that may yet be a marker, or the head of a call, is not taken
until that is known; a head that is no call after all becomes content. Each character is
read a bounded number of times.

A format is a declaration: the markers of a family, in one of five notations (`objects`,
`headers`, `tags`, `python_calls`, `gemma`; Harmony is a reader of its own), and how calls
are written in it. `table.py` has them all, and `choice.py` finds a model's.

Where calls are required, or strict, `forms.py` has the other direction: grammars that
allow only what readers accept as such calls, made from the same declaration.
"""
