"""Runs in a container beside the trial's, which shares its network: a loopback and nothing else. What connects to the port is
passed on to a Unix socket of the rollouts (`forward.py`). Given to `python3 -c` as text: it imports the standard library alone,
and runs on releases of Python that Steno itself does not.

    forwarder.py serve PORT SOCKET
    forwarder.py ask PORT PATH       exit code 0 if the answer is 200; else what came instead is printed
"""

import asyncio
import http.client
import signal
import sys


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass


async def serve(port: int, socket: str) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward, back = await asyncio.open_unix_connection(socket)
        except OSError:
            writer.close()
            return
        ways = [asyncio.ensure_future(pump(reader, back)), asyncio.ensure_future(pump(onward, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)  # either side closes: so does the other
        for way in ways:
            way.cancel()
        for each in (writer, back):
            each.close()

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    _, heard = await asyncio.open_unix_connection(socket)
    heard.close()
    await server.serve_forever()


def ask(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        said = answer.read(400).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return repr(error)
    return "" if answer.status == 200 else f"{answer.status} {said}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.argv[1] == "serve":
        asyncio.run(serve(int(sys.argv[2]), sys.argv[3]))
    else:
        found = ask(int(sys.argv[2]), sys.argv[3])
        print(found)
        sys.exit(1 if found else 0)
