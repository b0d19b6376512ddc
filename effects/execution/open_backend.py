"""The backend that runs a model's operations on a device."""

import torch

from minfer.effects.execution.cpu.cpu_backend import CpuBackend, describe_products
from minfer.effects.execution.device.backend import Backend
from minfer.effects.execution.device.streams import is_gpu
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.records.config import EngineConfig


def open_backend(
    spec: ModelSpec, config: EngineConfig, device: torch.device, *, kernels: bool
) -> Backend:
    """Returns the backend for a device. `kernels`: the backend of GPUs, also for the CPU,
    where it runs the kernels' references.
    """
    if not kernels and not is_gpu(device):
        return CpuBackend(device, described=describe_products(spec))
    # Imports Triton, which the CPU does not need.
    from minfer.effects.execution.cuda.cuda_backend import CudaBackend

    return CudaBackend.make(spec, config, device)
