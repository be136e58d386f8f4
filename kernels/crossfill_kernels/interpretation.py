"""Runs the Triton kernels in Triton's interpreter, on the CPU, for tests and checks without a GPU."""

import importlib

from crossfill_kernels.compilation import ops_with_triton


def interpret_kernels() -> None:
    """From now on this process interprets the kernels of every op; CPU tensors may be handed to them.

    A kernel is interpreted if it was imported while `knobs.runtime.interpret` was set; so are the functions of Triton's
    own library, hence its reload. The environment stays as it is: processes started later must not inherit the choice.
    It is wrong to call this after a kernel was imported to be compiled.
    """
    import triton
    import triton.experimental.gluon  # takes its functions from the library, so it has to come before the reload

    language = triton.language
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        library = importlib.reload(language.standard)
        for name in set(vars(language)) & set(vars(library)):
            if isinstance(getattr(language, name), triton.JITFunction):
                setattr(language, name, getattr(library, name))
        for op in ops_with_triton():
            importlib.import_module(f"crossfill_kernels.{op}.triton")
