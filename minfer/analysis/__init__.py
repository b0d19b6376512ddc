"""Questions to a run, live or recorded: folds over its turns.

drafts.py      how many drafts were proposed and accepted
lives.py       where the time of one request's samples went
prefixes.py    the prefix hit that a request had, and the one that it could have had
explain.py     both, as the explanation of one request
"""
