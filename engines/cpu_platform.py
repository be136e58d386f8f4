"""The CPU platform itself; imported by SGLang when `engines.platform.activate` names it."""

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from engines.plugin import ATTENTION_BACKEND


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # SGLang is untyped
    """Eager PyTorch on the host's CPU: no Triton, no graphs, no pinned memory."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """Our own backend; `--attention-backend torch_native` takes SGLang's."""
        return ATTENTION_BACKEND

    def get_dispatch_key_name(self) -> str:
        """Make every fused operation take its `forward_native`."""
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Nothing is compiled on this platform."""
        return "eager"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """There is no device to pin host memory to."""
        return False

    def get_torch_profiler_activity_str(self) -> str:
        """Name of the profiler activity, as SGLang spells it."""
        return "CPU"

    def get_torch_profiler_activity(self) -> Any:
        """The profiler activity itself."""
        return torch.profiler.ProfilerActivity.CPU
