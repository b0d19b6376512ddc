"""Executors: they run plans on a device.

contract.py is the interface, torch_executor.py the executor of models. packing/ has a
plan as words for the device, and the results; device/ the rows on it, cpu/ and cuda/ its
operations; warming/ what happens before the first request. running/ has a plan's way to
the device: plan_launcher.py, runner.py, and its steps: device_step.py, and for steps with
drafts `speculative_step` in speculative_step.py, which shows speculative decoding (draft,
verify, accept, advance) from top to bottom.
"""
