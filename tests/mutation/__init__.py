"""Mutation testing of the core: small bugs, made by rule, each of which some test has to
notice.

Theory. A test suite is as sharp as the bugs it finds. `operators` makes small bugs out of
a syntax tree: a comparison moved by one, a term, a condition or an update dropped,
arguments swapped. `catalogue` says which files decide something and chooses some hundred
of their mutants, by a hash of each mutant's own name, so that a change in one function
does not change the choice in another. `loader` puts a changed tree in place of a module
as it is imported: no file is written. `plugin` is pytest's, and keeps a mutant's run
within its CPU time; `runner` runs many, in parallel and resumably. What survives is a
missing test, or equal to the original: `tests.core.equivalents` says of each such mutant
why.

A mutant's name is its file, its function, its operator and the text of the expression
before and after, as the syntax tree spells it: reformatting changes no name.

    python -m tests.core.mutants              # all: half an hour on two cores
    python -m tests.core.mutants --sample 30  # 30, chosen by --seed
"""
