"""The worker process: stock SGLang, with Crossfill's platform and plugin found through their entry points.

`python -m engines.worker <SGLang options>`. SGLang spawns its scheduler and detokenizer processes, each of which
imports this module again, so nothing happens at import.
"""

import os
import sys

from engines import compat, plugin
from engines.errors import EngineError
from engines.hooks import ReuseHeader


def main(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT; SGLang then finishes the requests it runs.

    Args:
        argv: SGLang's options, as `engines.config.WorkerConfig.sglang_args` makes them.

    Returns:
        The exit status; 1 after one line on stderr when the installed SGLang does not fit.
    """
    try:
        compat.check()
    except EngineError as error:
        print(f"crossfill worker: {error}", file=sys.stderr)  # noqa: T201  # the one line an operator reads
        return 1
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        plugin.check_hooks()
    except EngineError as error:
        print(f"crossfill worker: {error}", file=sys.stderr)  # noqa: T201
        return 1
    app.add_middleware(ReuseHeader)
    try:
        run_server(prepare_server_args(argv))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
