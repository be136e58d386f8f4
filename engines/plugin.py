"""Entry point `sglang.srt.plugins`: what Crossfill adds to SGLang in each of its processes."""

import functools
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    from engines.hooks import AnswerHooks, SchedulerHooks
    from engines.reuse.engine import ReuseEngine
    from engines.reuse.settings import ReuseSettings
    from engines.shadow_hooks import ShadowHooks

ATTENTION_BACKEND = "crossfill"
"""Value of SGLang's --attention-backend that selects ours."""

INNER_VARIABLE = "CROSSFILL_INNER_BACKEND"
"""Of a worker's environment: SGLang's backend that computes what is not reused; ours alone if not set."""

MAPPED_MODELS = "engines.mapped_models"
"""Package that SGLang takes models from, before its own, in a worker that uses maps."""

INTERPRET_VARIABLE = "CROSSFILL_INTERPRET_TRITON"
"""Of a worker's environment: set if the attention of reuse is to run in Triton's interpreter."""


def register() -> None:
    """Register the attention backend; end the process with one line when SGLang moved.

    Raises:
        SystemExit: SGLang is not the pinned one. SGLang logs and swallows a plugin's ordinary exceptions, and a worker
            that silently ran without its plugin would look healthy, so this one must not be an `Exception`.
    """
    from engines import compat
    from engines.errors import IncompatibleSglangError

    try:
        compat.check()
    except IncompatibleSglangError as error:
        raise SystemExit(f"crossfill: {error}") from error
    compat.add_attention_backend(ATTENTION_BACKEND, _make_backend)
    if (settings := _reuse_settings()) is not None:
        for target, (kind, hook) in _hooks_for(settings).items():
            compat.add_hook(target, hook, kind)


def check_hooks() -> None:
    """Make sure that what `register` asked for happened.

    Raises:
        IncompatibleSglangError: SGLang did not apply a hook.
    """
    from engines import compat

    if (settings := _reuse_settings()) is not None:
        compat.check_hooks(_hooks_for(settings))


def _reuse_settings() -> "ReuseSettings | None":
    from engines.reuse.settings import VARIABLE, ReuseSettings

    told = os.environ.get(VARIABLE)
    return ReuseSettings.model_validate_json(told) if told else None


@functools.cache
def _parts() -> "tuple[SchedulerHooks, AnswerHooks]":
    from engines.hooks import AnswerHooks, SchedulerHooks

    return SchedulerHooks(_shadow_part()), AnswerHooks()


@functools.cache
def _shadow_part() -> "ShadowHooks":
    from engines.shadow_hooks import ShadowHooks

    return ShadowHooks()


def _hooks_for(settings: "ReuseSettings") -> "dict[str, tuple[str, Callable[..., Any]]]":
    return {**_hooks(), **_shadow_hooks()} if settings.is_shadowed else _hooks()


def _shadow_hooks() -> "dict[str, tuple[str, Callable[..., Any]]]":
    """What is hooked into SGLang if some prefills are compared."""
    shadow = _shadow_part()
    return {
        "sglang.srt.managers.scheduler.Scheduler.on_idle": ("BEFORE", shadow.before_idle),
        "sglang.srt.model_executor.model_runner.ModelRunner.sample": ("BEFORE", shadow.before_sample),
    }


def _hooks() -> "dict[str, tuple[str, Callable[..., Any]]]":
    """What is hooked into SGLang, and how."""
    scheduler, answer = _parts()
    managers, openai = "sglang.srt.managers", "sglang.srt.entrypoints.openai"
    updater = f"{managers}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    return {
        f"{managers}.scheduler.Scheduler._create_generation_req": ("AFTER", scheduler.after_create),
        f"{managers}.scheduler.Scheduler.abort_request": ("BEFORE", scheduler.before_abort),
        f"{managers}.scheduler.Scheduler.send_abort_output": ("BEFORE", scheduler.before_abort_output),
        f"{managers}.schedule_batch.Req.reset_for_retract": ("AFTER", scheduler.after_retract),
        **{
            f"{updater}.update_weights_from_{source}": ("BEFORE", scheduler.before_weights)
            for source in ("disk", "distributed", "tensor", "ipc")
        },
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": ("AFTER", scheduler.after_batch),
        f"{managers}.scheduler_components.output_streamer.SchedulerOutputStreamer"
        ".is_request_level_customized_info_key": ("AFTER", scheduler.after_level),
        f"{managers}.tokenizer_manager.TokenizerManager.update_request_meta_info": ("AFTER", answer.after_meta_info),
        **{
            f"{openai}.{serving}._handle_{kind}_request": ("AROUND", answer.around_answer)
            for serving in ("serving_chat.OpenAIServingChat", "serving_completions.OpenAIServingCompletion")
            for kind in ("streaming", "non_streaming")
        },
    }


def _make_backend(runner: Any) -> "AttentionBackend":
    # Imported when a model runner asks for it: only the scheduler process needs the backend's imports.
    from engines.attention.backend import CrossfillAttentionBackend

    if os.environ.get(INTERPRET_VARIABLE):
        _interpret_triton()
    reuse, inner = _make_engine(runner), os.environ.get(INNER_VARIABLE)
    if inner is None:
        return CrossfillAttentionBackend(runner, reuse=reuse)
    from engines import compat
    from engines.attention.beside import Beside

    backend = compat.make_attention_backend(inner, runner)
    if reuse is not None:
        Beside(runner, reuse).attach(backend)
    return backend


def _interpret_triton() -> None:
    from crossfill_kernels import dispatch
    from crossfill_kernels.interpretation import interpret_kernels

    interpret_kernels()
    # These run on the scheduler's thread alone; the interpreter is not made for several threads.
    dispatch.force("triton", {"block_mass", "guided_attention", "map_attention"})


def _unsuited(server_args: Any) -> str | None:
    """The first of SGLang's options that changes which rows, heads or tokens a worker computes; None if none does."""
    asked = {
        "tensor parallelism": server_args.tp_size > 1,
        "pipeline parallelism": server_args.pp_size > 1,
        "speculative decoding": server_args.speculative_algorithm is not None,
        "mixed chunks": server_args.enable_mixed_chunk,
        "overlap schedule": not server_args.disable_overlap_schedule,
        "disaggregation": server_args.disaggregation_mode != "null",
        # These bring keys back into other slots, of which nobody knows how exact they are.
        "hierarchical cache": server_args.enable_hierarchical_cache,
        "LMCache": server_args.enable_lmcache,
    }
    return next((option for option, is_so in asked.items() if is_so), None)


def _make_engine(runner: Any) -> "ReuseEngine | None":
    settings = _reuse_settings()
    if settings is None:
        return None
    from engines.reuse.assembly import assemble, assemble_shadow

    check_hooks()
    if (option := _unsuited(runner.server_args)) is not None:
        raise SystemExit(f"crossfill: reuse does not work with SGLang's {option}; leave that out, or the model's pairs")
    pool = runner.token_to_kv_pool
    keys = pool.get_key_buffer(0)
    engine = assemble(settings, slots=keys.shape[0], device=keys.device.type)
    if engine.uses_maps:
        # The package of these is imported by SGLang itself, if at all.
        from engines.mapped_models.attention import skips_queries

        engine.layers.skips_queries = skips_queries(runner.model)
    _parts()[0].engine = engine
    if settings.is_shadowed:
        shadow = _shadow_part()
        shadow.engine, shadow.shadow = engine, assemble_shadow(settings, engine)
    return engine
