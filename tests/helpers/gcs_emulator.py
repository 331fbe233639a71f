"""gcp-storage-emulator as a program, with two repairs.

An object of one request keeps its last byte. The emulator reads such a body with Python's parser of mails, which takes
a last byte 13 of an object for a part of the line's end, since gcsfs ends lines by a bare line feed: one in 256 objects
came back a byte short. And more than five clients may connect at once; the kernel reset some of the others.
"""

from __future__ import annotations

import json
import socketserver
from email.message import Message
from typing import Any

from gcp_storage_emulator import server
from gcp_storage_emulator.__main__ import main

read_data = server._read_data


def read_whole_data(request_handler: Any, query: Any) -> Any:
    declared = Message()
    declared["Content-Type"] = request_handler.headers.get("Content-Type") or "application/octet-stream"
    if declared.get_content_type() != "multipart/related":
        return read_data(request_handler, query)
    raw = server._decode_raw_data(server._read_raw_data(request_handler), request_handler)
    boundary = b"--" + str(declared.get_boundary()).encode()
    _, _, body = raw.partition(boundary)
    line_end = b"\r\n" if body.startswith(b"\r\n") else b"\n"
    meta, content = (part.removeprefix(line_end) for part in body.split(line_end + boundary)[:2])
    head, _, data = content.partition(line_end * 2)
    content_type = next(
        (line.partition(b":")[2].strip() for line in head.split(line_end) if line.lower().startswith(b"content-type:")),
        b"application/octet-stream",
    )
    return {
        "meta": json.loads(meta.partition(line_end * 2)[2]),
        "content": data,
        "content-type": content_type.decode(),
    }


server._read_data = read_whole_data
socketserver.TCPServer.request_queue_size = 512

if __name__ == "__main__":
    main()
