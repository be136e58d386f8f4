"""A scripted stand-in for an SGLang worker: real HTTP, no model. For tests of a router and for demos."""

from engines.fake_worker.script import Reply, Script, ScriptError, SlowHealth, load_script
from engines.fake_worker.server import FakeWorker, RecordedRequest, run

__all__ = ["FakeWorker", "RecordedRequest", "Reply", "Script", "ScriptError", "SlowHealth", "load_script", "run"]
