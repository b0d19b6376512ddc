"""What a model says that is not for reading: calls of tools, and its reasoning.

Models are trained to write both into their text, between markers, each family in a format
of its own. A parser takes the text as it comes and tells apart what is content, what is
reasoning, and which calls there are:

    text ---> Source ---> a format's reader ---> Outlet ---> deltas

A reader is a generator: it is written as if the text was all there, takes characters one
after the other, and yields where there are none yet. So it cannot see where the text is
cut, and what it finds does not depend on that. What could still turn out to be a marker,
or the head of a call, is not taken until it is known; a head that is no call after all is
given back as content. Each character is looked at a bounded number of times.

Where calls must be made, or must fit, `forms.py` has the other direction: grammars that
let through nothing but what readers will take for such calls.
"""
