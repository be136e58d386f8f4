"""Entry point `sglang.srt.platforms`: offers SGLang a plain-PyTorch CPU platform.

SGLang's own CPU engine needs AVX-512/AMX kernels that no package index carries. An out-of-tree platform, a supported
extension point, makes every fused operation take its native PyTorch form, on any x86-64 or arm64 CPU.
"""

import os

from engines import torchvision_stub

NAME = "crossfill_cpu"
"""Value of SGLANG_PLATFORM that selects this platform; also the entry point's name."""


def activate() -> str | None:
    """Name the platform class when it was asked for, else leave the machine to SGLang."""
    # Only on request: an SGLang that somebody runs beside Crossfill in this environment must not change.
    if os.environ.get("SGLANG_PLATFORM") != NAME:
        return None
    torchvision_stub.install()
    return "engines.cpu_platform:CpuPlatform"
