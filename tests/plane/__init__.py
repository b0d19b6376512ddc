"""The whole control plane on one thread and a virtual clock, with faults.

What it found in minfer while it was being built, all mended since, and planted again in
`planted.py` to show that they would be found:

- Samples that ended in the same turn were cancelled in the order of a set of strings, so
  that the next decisions depended on the process' hash seed ("set order").
- The parts of answers to several prompts overtook each other when a client read slowly
  ("overtaking").
- `request_success` counted requests otherwise than their clients saw them end ("ends of
  the engine").
- A second run in the same second took the first one's name, once that one's first segment
  was gone, and the two were read as one journal ("name again"; since small journals
  rotate early).
"""
