"""The persistent map that the engine uses, behind one name.

`Map` is a hash array mapped trie: `set` and `delete` return a new map that shares all but
a path of log32(n) nodes with the old one, so that a new state costs only its changes.
`mutate()` gives a private draft for a batch of changes; a draft never leaves the function
that made it. `immutables` is in C; alternatives in pure Python or Rust were three to six
times slower at `set`.
"""

from immutables import Map

__all__ = ["Map"]
