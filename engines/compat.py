"""What Crossfill takes from SGLang's inside, checked before it is used.

SGLang's plugin loader logs and goes on when something a plugin needs has moved; Crossfill refuses to start instead.
Every name that `engines` uses beyond SGLang's command line stands in `TARGETS`, with the parameters it relies on.
"""

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from engines.errors import IncompatibleSglangError

SGLANG_VERSION = "0.5.23"

_FORWARD = ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")

TARGETS: Mapping[str, tuple[str, ...]] = {
    "sglang.launch_server:run_server": ("server_args",),
    "sglang.srt.server_args:prepare_server_args": ("argv",),
    "sglang.srt.plugins:load_plugins": (),
    "sglang.srt.utils:kill_process_tree": ("parent_pid", "include_parent"),
    "sglang.srt.layers.attention.attention_registry:register_attention_backend": ("name",),
    "sglang.srt.arg_groups.choices:ATTENTION_BACKEND_CHOICES": (),
    "sglang.srt.layers.attention.base_attn_backend:AttentionBackend.forward_extend": _FORWARD,
    "sglang.srt.layers.attention.base_attn_backend:AttentionBackend.forward_decode": _FORWARD,
    "sglang.srt.layers.attention.base_attn_backend:AttentionBackend.init_forward_metadata": ("forward_batch",),
    "sglang.srt.layers.radix_attention:RadixAttention": (
        "num_heads",
        "head_dim",
        "scaling",
        "num_kv_heads",
        "layer_id",
    ),
    "sglang.srt.mem_cache.memory_pool:KVWriteLoc": ("loc",),
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.set_kv_buffer": ("layer", "loc_info", "cache_k", "cache_v"),
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.get_key_buffer": ("layer_id",),
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.get_value_buffer": ("layer_id",),
    "sglang.srt.platforms.interface:SRTPlatform.get_default_attention_backend": (),
    "sglang.srt.platforms.interface:SRTPlatform.get_dispatch_key_name": (),
}


def check(version: str | None = None, targets: Mapping[str, tuple[str, ...]] = TARGETS) -> None:
    """Compare the installed SGLang with what Crossfill was written against.

    Args:
        version: the version to judge; the installed one by default.
        targets: `module:attribute` paths and the parameters each must take.

    Raises:
        IncompatibleSglangError: SGLang is missing, has another version, or a target moved or changed its parameters.
    """
    found = version or _installed_version()
    if found != SGLANG_VERSION:
        raise IncompatibleSglangError(
            f"SGLang {found} is installed, Crossfill needs exactly {SGLANG_VERSION} "
            f"(run `make setup`, or `pip install --no-deps sglang=={SGLANG_VERSION}`)"
        )
    for path, parameters in targets.items():
        _check_target(path, parameters)


def _installed_version() -> str:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise IncompatibleSglangError(
            f"SGLang is not installed, Crossfill needs {SGLANG_VERSION} (run `make setup`)"
        ) from None


def _check_target(path: str, parameters: tuple[str, ...]) -> None:
    try:
        target = pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise IncompatibleSglangError(
            f"SGLang {SGLANG_VERSION} has no {path}, which Crossfill uses ({error})"
        ) from error
    if parameters:
        missing = [name for name in parameters if name not in inspect.signature(target).parameters]
        if missing:
            raise IncompatibleSglangError(f"SGLang's {path} does not take {', '.join(missing)}, which Crossfill passes")


def add_attention_backend(name: str, make: Callable[[Any], object]) -> None:
    """Register an attention backend and allow its name on the command line.

    Raises:
        IncompatibleSglangError: the registration did not take.
    """
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention import attention_registry

    attention_registry.register_attention_backend(name)(make)
    if name not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([name])
    if attention_registry.ATTENTION_BACKENDS.get(name) is not make or name not in choices.ATTENTION_BACKEND_CHOICES:
        raise IncompatibleSglangError(f"SGLang {SGLANG_VERSION} did not accept the attention backend {name!r}")
