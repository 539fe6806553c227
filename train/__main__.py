import os
import sys

from .cli import main

code = main()
if os.environ.get("WORLD_SIZE", "1") != "1":
    # One of several processes. DTensor's caches hold their group after it was destroyed, so Gloo's threads live on, and
    # one that lets go of its last tensor while Python is being taken down ends the process with SIGABRT
    # (https://github.com/pytorch/pytorch/issues/190489). Nothing is left to do but the streams: leave without that.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
sys.exit(code)
