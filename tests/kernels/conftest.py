import importlib

import pytest
import torch


@pytest.fixture(scope="session")
def triton_device():
    """Where Triton kernels run: the GPU, or this process, which then interprets them.

    A kernel is interpreted if it was imported while `knobs.runtime.interpret` was set; so are the functions of Triton's
    own library, hence its reload. The environment stays as it is: workers of other tests must not inherit the choice.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    import triton
    import triton.experimental.gluon  # takes its functions from the library, so it has to come before the reload

    from crossfill_kernels.compilation import ops_with_triton

    language = triton.language
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        library = importlib.reload(language.standard)
        for name in set(vars(language)) & set(vars(library)):
            if isinstance(getattr(language, name), triton.JITFunction):
                setattr(language, name, getattr(library, name))
        for op in ops_with_triton():
            importlib.import_module(f"crossfill_kernels.{op}.triton")
    return torch.device("cpu")
