"""Executors: they run plans on a device.

contract.py is the interface, torch_executor.py the executor of models. packing/ has a
plan as words for the device, and the results; device/ the rows on it, cpu/ and cuda/ its
operations; warming/ what happens before the first request. running/ runs plans:
plan_launcher.py launches a plan, runner.py runs its forwards, by CUDA graphs where there
are some, and device_step.py is what a step launches. For steps with drafts that is
`speculative_step` in speculative_step.py, which shows speculative decoding (draft,
verify, accept, advance) from top to bottom. ranks/ and rank_loop.py are for engines of
several ranks, tiers/ for KV blocks outside of the device.
"""
