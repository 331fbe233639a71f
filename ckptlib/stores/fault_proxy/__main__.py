"""The proxy as a process: prints its URL, then works until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import logging
import signal

from ckptlib.stores.fault_proxy import FaultProxy


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ckptlib.stores.fault_proxy", description=__doc__)
    parser.add_argument("--upstream", required=True, metavar="URL", help="the server, as http://HOST:PORT")
    parser.add_argument("--port", type=int, default=0, help="of loopback; any free one when absent")
    parser.add_argument("--rules", metavar="FILE", help="JSON list of rules, read again whenever it changes")
    parser.add_argument("--log", metavar="FILE", help="is given a line of JSON for each request that ended")
    given = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the thread starts, so that none of them gets it
    with FaultProxy(given.upstream, port=given.port, rules_path=given.rules, log_path=given.log) as proxy:
        print(proxy.url, flush=True)
        signal.sigwait(ends)


if __name__ == "__main__":
    main()
