"""Settings for the whole suite."""

import os

import hypothesis

# Small models on shared machines: threads that wait for each other cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton decides when it is imported, which transformers does, whether to interpret its kernels.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
# No example database and no clock: the same tests on every machine, each time. New examples are for
# `--hypothesis-profile fresh`, for the swarm and for the whole plane's seeds.
hypothesis.settings.register_profile("suite", database=None, deadline=None, derandomize=True)
hypothesis.settings.register_profile("fresh", database=None, deadline=None, derandomize=False)
hypothesis.settings.load_profile("suite")
