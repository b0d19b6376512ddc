"""Structured outputs: constraints become masks of tokens.

    StructuredOutputs --grammar_text.py, schemas.py--> llguidance's own language
          --Compiler.compile--> Grammar --matcher--> Matcher: which tokens may come next

`grammar_library.py` is the interface to a library, `llguidance_compiler.py` implements it
with llguidance, and `store.py` caches compiled grammars.
"""
