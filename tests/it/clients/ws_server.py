"""A websocket app: echoes each message; ends when its standard input does.

Prints one line of JSON per event: listening (port), opened (path, fields), message (kind, size), closed (code).
`/close/4001` is closed by the app with that code; on `/speak` the app sends a message first.
"""

import argparse
import asyncio
import json
import sys

from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed


def say(event, **facts):
    print(json.dumps({"event": event, **facts}), flush=True)


async def converse(socket):
    path = socket.request.path
    say("opened", path=path, fields=list(socket.request.headers.raw_items()))
    try:
        if path.startswith("/close/"):
            await socket.close(int(path.rsplit("/", 1)[1]), "as you wish")
            return
        if path == "/speak":
            await socket.send("I speak first")
        async for message in socket:
            say("message", kind="text" if isinstance(message, str) else "binary", size=len(message))
            await socket.send(message)
    except ConnectionClosed:
        pass
    finally:
        await socket.wait_closed()
        say("closed", code=socket.close_code)


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--subprotocol", action="append")
    options = parser.parse_args()
    served = serve(
        converse, "127.0.0.1", 0, subprotocols=options.subprotocol, max_size=None, ping_interval=None
    )
    async with served as server:
        say("listening", port=server.sockets[0].getsockname()[1])
        await asyncio.to_thread(sys.stdin.read)


asyncio.run(main())
