#!/usr/local/bin/python3
"""In the place of gost, which no registry of packages has: what Harbor's sidecar starts as `gost -C gost.yaml`.

It passes on a TCP connection that was redirected to it, if the address that it was meant for stands in the list; else it closes
it. It knows addresses only: gost also goes by the names that HTTP and TLS say.
"""

import asyncio
import re
import socket
import struct
import sys
from pathlib import Path

config = Path(sys.argv[sys.argv.index("-C") + 1]).read_text()
PORT, MARK, ALLOWED = (
    re.search(pattern, config)[1] for pattern in (r'addr: ":(\d+)"', r"so_mark: (\d+)", r"path: (\S+)")
)
ORIGINAL_DST = 80
"""Of netfilter: whom a redirected connection was meant for."""


async def passed(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def serve(reader, writer):
    asked = writer.get_extra_info("socket").getsockopt(socket.SOL_IP, ORIGINAL_DST, 16)
    port, packed = struct.unpack("!2xH4s8x", asked)
    address = socket.inet_ntoa(packed)
    try:
        if address in Path(ALLOWED).read_text().split():
            there = socket.socket()
            there.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, int(MARK))  # or it would come back here
            there.setblocking(False)
            await asyncio.get_running_loop().sock_connect(there, (address, port))
            answers, questions = await asyncio.open_connection(sock=there)
            await asyncio.gather(passed(reader, questions), passed(answers, writer))
    except OSError:
        pass
    finally:
        writer.close()


async def main():
    server = await asyncio.start_server(serve, "0.0.0.0", int(PORT))
    await server.serve_forever()


asyncio.run(main())
