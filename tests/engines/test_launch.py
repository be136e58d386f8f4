import subprocess
import sys

import pytest
from pydantic import ValidationError

from engines import launch, platform
from engines.config import WorkerConfig
from engines.errors import WorkerConfigError


def config(tmp_path, **changes):
    return WorkerConfig(**{"model_path": str(tmp_path), "name": "tiny", "port": 31000, **changes})


def option(args, name):
    return args[args.index(name) + 1]


def test_a_cpu_worker_is_bounded_and_uses_our_platform_and_backend(tmp_path):
    args = launch.command(config(tmp_path))
    assert option(args, "--attention-backend") == "crossfill"
    assert option(args, "--dtype") == "float32"
    assert option(args, "--max-total-tokens") == "16384"
    assert option(args, "--served-model-name") == "tiny"
    environment = launch.environment(config(tmp_path), {"PATH": "/bin"})
    assert environment["SGLANG_PLATFORM"] == platform.NAME
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["PATH"] == "/bin"


def test_a_cuda_worker_is_left_to_sglangs_own_choices(tmp_path):
    args = config(tmp_path, device="cuda").sglang_args()
    assert "--attention-backend" not in args
    assert "--max-total-tokens" not in args
    assert option(args, "--dtype") == "auto"
    assert "SGLANG_PLATFORM" not in launch.environment(config(tmp_path, device="cuda"), {})


def test_cuda_without_a_driver_is_refused_before_the_slow_start(tmp_path, monkeypatch):
    def no_driver(name):
        raise OSError(name)

    monkeypatch.setattr(launch.ctypes, "CDLL", no_driver)
    with pytest.raises(WorkerConfigError, match="no NVIDIA driver"):
        launch.command(config(tmp_path, device="cuda"))


def test_an_abbreviation_of_our_own_option_is_refused_too(tmp_path):
    with pytest.raises(WorkerConfigError, match="may not set --served-model-nam"):
        launch.command(config(tmp_path, extra_args=("--served-model-nam", "other")))


def test_extra_args_reach_sglang_but_may_not_override_ours(tmp_path):
    assert launch.command(config(tmp_path, extra_args=("--context-length", "512")))[-1] == "512"
    with pytest.raises(WorkerConfigError, match="may not set --port"):
        launch.command(config(tmp_path, extra_args=("--port=1",)))


@pytest.mark.parametrize("path", ["/no/such/folder", "./missing", "var/models/missing"])
def test_a_missing_folder_is_found_before_the_slow_start(tmp_path, path):
    with pytest.raises(WorkerConfigError, match="does not exist"):
        launch.command(config(tmp_path, model_path=path))


def test_a_hub_id_is_no_missing_folder(tmp_path):
    assert option(launch.command(config(tmp_path, model_path="org/model")), "--model-path") == "org/model"


def test_an_unknown_setting_is_refused(tmp_path):
    with pytest.raises(ValidationError, match="max_tokens"):
        config(tmp_path, max_tokens=1)


def test_launching_needs_no_torch():
    code = "import engines.launch, sys; sys.exit('torch' in sys.modules or 'sglang' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_platform_stays_out_unless_asked_for(monkeypatch):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert platform.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", platform.NAME)
    assert platform.activate() == "engines.cpu_platform:CpuPlatform"


def test_sglang_finds_platform_and_plugin_by_their_entry_points():
    from importlib.metadata import entry_points

    assert entry_points(group="sglang.srt.platforms")[platform.NAME].value == "engines.platform:activate"
    assert entry_points(group="sglang.srt.plugins")["crossfill"].value == "engines.plugin:register"


def test_the_torchvision_stub_is_what_makes_the_import_work():
    stubbed = "from engines import torchvision_stub as stub; stub.install(); stub.install(); import torchvision"
    bare = "import torch, sys; sys.exit(0 if torch.version.cuda else 7)"
    assert subprocess.run([sys.executable, "-c", stubbed], capture_output=True, check=False).returncode == 0
    if subprocess.run([sys.executable, "-c", bare], check=False).returncode == 7:
        control = subprocess.run(
            [sys.executable, "-c", "import torchvision"], capture_output=True, text=True, check=False
        )
        # Where a matching CPU wheel of torchvision is installed, the stub is not needed and must do no harm.
        assert control.returncode == 0 or "torchvision::nms" in control.stderr
