"""What Crossfill takes from SGLang's inside, checked before it is used.

SGLang's plugin loader logs and goes on when something a plugin needs has moved; Crossfill refuses to start instead.
Every name that `engines` uses beyond SGLang's command line stands in `TARGETS`, with the parameters it relies on.
"""

import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Any

from engines.errors import IncompatibleSglangError

SGLANG_VERSION = "0.5.23"

_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer:SchedulerOutputStreamer"
_TOKENIZED = ("rid", "input_ids", "sampling_params", "stream", "extra_key")
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
    "sglang.srt.plugins.hook_registry:HookRegistry.register": ("target", "hook", "hook_type"),
    "sglang.srt.plugins.hook_registry:HookRegistry._patched": (),
    "sglang.srt.managers.scheduler:Scheduler._create_generation_req": ("recv_req",),
    "sglang.srt.managers.scheduler:Scheduler.abort_request": ("recv_req",),
    "sglang.srt.managers.scheduler:Scheduler.send_abort_output": ("abort_req", "req"),
    "sglang.srt.managers.scheduler:Scheduler.handle_generate_request": ("recv_req",),
    "sglang.srt.managers.scheduler:Scheduler.is_fully_idle": (),
    "sglang.srt.managers.scheduler:Scheduler.on_idle": (),
    "sglang.srt.managers.io_struct:AbortReq": ("rid",),
    "sglang.srt.managers.io_struct:TokenizedGenerateReqInput": _TOKENIZED,
    "sglang.srt.sampling.sampling_params:SamplingParams": ("max_new_tokens", "temperature", "ignore_eos"),
    "sglang.srt.sampling.sampling_params:SamplingParams.normalize": ("tokenizer",),
    "sglang.srt.model_executor.model_runner:ModelRunner.sample": ("logits_output", "forward_batch"),
    **dict.fromkeys(
        (
            f"sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager.update_weights_from_{s}"
            for s in ("disk", "distributed", "tensor", "ipc")
        ),
        ("recv_req",),
    ),
    "sglang.srt.managers.schedule_batch:Req.reset_for_retract": (),
    "sglang.srt.managers.schedule_batch:FINISH_ABORT": ("message", "status_code", "err_type"),
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch.init_new": ("batch", "model_runner"),
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.update_request_meta_info": (
        "meta_info",
        "state",
        "customized_info",
    ),
    f"{_STREAMER}.is_request_level_customized_info_key": ("key",),
    **dict.fromkeys(
        (
            f"sglang.srt.entrypoints.openai.{module}._handle_{kind}_request"
            for module in ("serving_chat:OpenAIServingChat", "serving_completions:OpenAIServingCompletion")
            for kind in ("streaming", "non_streaming")
        ),
        ("adapted_request", "request", "raw_request"),
    ),
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


def add_hook(target: str, hook: Callable[..., Any], kind: str) -> None:
    """Have `hook` called BEFORE, AFTER or AROUND what `target` (a dotted path) names, once SGLang applies hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType[kind])


def check_hooks(targets: Iterable[str]) -> None:
    """Make sure that SGLang applied these hooks: it logs a failure and goes on.

    Raises:
        IncompatibleSglangError: names the first that it did not.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    for target in targets:
        if target not in HookRegistry._patched:
            raise IncompatibleSglangError(f"SGLang {SGLANG_VERSION} did not apply the hook on {target}")


def make_attention_backend(name: str, runner: Any) -> Any:
    """One of SGLang's own attention backends.

    Raises:
        IncompatibleSglangError: it has none of this name.
    """
    from sglang.srt.layers.attention import attention_registry

    make = attention_registry.ATTENTION_BACKENDS.get(name)
    if make is None:
        raise IncompatibleSglangError(f"SGLang {SGLANG_VERSION} has no attention backend {name!r}")
    return make(runner)


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
