"""A plan on the device: its launches (plan_launcher.py, runner.py), and those of a step
(device_step.py): the forward pass, speculation (speculative_step.py), sampling.
"""
