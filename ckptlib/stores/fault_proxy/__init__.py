"""A proxy between a client of an object store and its server, which counts requests and breaks them by rules.

    with FaultProxy(upstream="http://127.0.0.1:8333") as proxy:
        proxy.rules([{"match": "^UploadPart", "fault": "503", "count": 3}])
        checkpointer = Checkpointer("s3://bucket/run", {"endpoint_url": proxy.url, ...})
        ...
        assert [request.op for request in proxy.requests] == ...

It runs in a thread of its own, or as a process, away from the job whose speed is measured:

    python -m ckptlib.stores.fault_proxy --upstream http://127.0.0.1:8333 --rules rules.json --log requests.jsonl

which prints its URL, reads the rules again whenever the file changes, and writes a line for each request that ended.
It listens on loopback only and passes everything on byte by byte: signatures, `Expect: 100-continue` and chunked
bodies stay as they are. Upstream is plain HTTP.

A rule is an object with

    match      a regular expression that is searched for in "OP path", such as "UploadPart /bucket/key?partNumber=1...";
               absent: every request
    fault      what happens, of the list below
    nth        the first matching request that meets the fault, from 0
    count      how many meet it; absent: one where nth is given, else each
    after      how many bytes of the body pass before the fault; 0 when absent
    seconds    how long a latency, a stall or a hang lasts; absent: until the client goes away
    bandwidth  bytes per second, of each connection and direction

    latency       the request is passed on `seconds` later
    bandwidth     both bodies pass at `bandwidth`
    refuse        the connection is reset before the server sees anything of the request
    down          nobody listens, and every connection is reset, for as long as the rule stands: match is not asked
    blackhole     the request is swallowed: all of it is read, the server sees nothing, no answer comes
    503 500 429 403   the answer, with the error body that S3, GCS or Azure would send; the server sees nothing
    reset_up      the connection is reset while the request's body is under way
    stall_up      the request's body is no longer read
    flip_up       one bit of the request's body is flipped, in the byte behind `after`
    hang_reply    the server has done what was asked, its answer is held back
    lost_reply    the server has done what was asked, the connection is reset before the answer
    reset_down, stall_down, flip_down   as above, for the answer's body
    truncate      the answer's body ends early, and the connection is closed in order

The first rule that matches and is not used up counts; those of latency and bandwidth apply beside it. Faults of the
request's body meet only bodies longer than `after`; those of an answer that turns out shorter are used up and do
nothing. A new list of rules begins all counts anew. Requests of GCS and Azure have the names that S3 has for the same.
A server that is killed looks as it would without the proxy, but for connections that it refuses: they are reset.
"""

from ckptlib.stores.fault_proxy.proxy import FaultProxy
from ckptlib.stores.fault_proxy.record import Request
from ckptlib.stores.fault_proxy.rules import Rule

__all__ = ["FaultProxy", "Request", "Rule"]
