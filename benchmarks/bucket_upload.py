"""A process that puts so many bytes into a bucket by obstore, once for each line that it reads; see `bucket_job`."""

from __future__ import annotations

import os
import sys

import numpy as np
import obstore
from obstore.store import S3Store

from ckptlib.stores.io_limits import PART_NBYTES


def work() -> None:
    bucket, _, prefix = sys.argv[1].removeprefix("s3://").partition("/")
    endpoint, key = os.environ["BUCKET_UPLOAD"].split()
    store = S3Store(
        bucket,
        endpoint=endpoint,
        access_key_id=key,
        secret_access_key=os.environ["BUCKET_SECRET"],
        region="us-east-1",
        virtual_hosted_style_request=False,
        unsigned_payload=True,
        client_options={"allow_http": True},
    )
    data = memoryview(np.random.default_rng(0).integers(0, 256, int(sys.argv[2]), dtype=np.uint8))
    print("ready", flush=True)
    for line in sys.stdin:
        name = f"{prefix}/outside-{line.strip()}"
        obstore.put(store, name, iter([data]), chunk_size=PART_NBYTES, max_concurrency=8)
        print("done", flush=True)


if __name__ == "__main__":
    work()
