"""Runs plans on the device: plan_launcher.py packs and launches a plan, runner.py runs
its forwards, by CUDA graphs where there are some, and device_step.py is what a step
launches: the forward pass, speculation (speculative_step.py), sampling.
"""
