"""A server process around the scripted runner: arguments are the shutdown timeout and the seconds of loading."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.byte_tokenizer import ByteTokenizer
from support.serving import MODEL, make_engine
from tenfold.errors import ModelError
from tenfold.server import ServerSettings
from tenfold.server.run import listen, run
from tenfold.server.state import Served

timeout, loading = float(sys.argv[1]), float(sys.argv[2])
listener = listen("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)


def load() -> Served:
    time.sleep(abs(loading))
    if loading < 0:
        raise ModelError("there is no such model")
    return Served(make_engine(seconds=0.01)[0], ByteTokenizer(), MODEL)


try:
    run(load, listener, ServerSettings(shutdown_timeout=timeout), lambda served: print("ready", flush=True))
except ModelError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)
print("left in order", flush=True)
