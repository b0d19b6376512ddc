"""Outputs that must look like something: constraints become masks of tokens.

    StructuredOutputs --spelled.py, schemas.py--> llguidance's own words
          --Compiler.compile--> Grammar --matcher--> Matcher: which tokens may come next

`protocol.py` says what is asked of a library, `by_llguidance.py` asks it of llguidance,
and `store.py` keeps what was compiled.
"""
