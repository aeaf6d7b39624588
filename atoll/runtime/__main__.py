"""``python -m atoll.runtime NAME --head HOST:PORT --keys BUNDLE``: one worker (see ``worker.main``)."""

from atoll.runtime.assembly import assemble
from atoll.runtime.measuring import measure
from atoll.runtime.worker import leave, main

leave(main(assemble, measure))
