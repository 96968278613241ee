"""A websocket client: connects to a listener, sends messages of several kinds and sizes to an echo, prints a verdict.

The verdict is one line of JSON with "ok"; after an error it has "error" too, and the exit code is 1.
The client resolves no name: the node's name goes into SNI and Host, the connection to --address.
"""

import argparse
import asyncio
import json
import os
import ssl
import sys

from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

SMALL_MESSAGES = 200
SIZES = [0, 1, 125, 126, 65_535, 65_536, 1 << 20, 5 << 20]


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True, help="host:port to connect to")
    parser.add_argument("--name", default="edge-1", help="the node: SNI and Host")
    parser.add_argument("--port", type=int, default=9100, help="the node's port, in Host")
    parser.add_argument("--path", default="/echo")
    parser.add_argument("--ca", help="root certificates; without it the connection is plain")
    parser.add_argument("--cert", help="client certificate")
    parser.add_argument("--key", help="client key")
    parser.add_argument("--token", help="bearer token")
    parser.add_argument("--subprotocol", action="append", help="may be repeated; the order is kept")
    return parser.parse_args()


def tls(options):
    if not options.ca:
        return None
    context = ssl.create_default_context(cafile=options.ca)
    context.set_alpn_protocols(["http/1.1"])
    if options.cert:
        context.load_cert_chain(options.cert, options.key)
    return context


def check(condition, what):
    if not condition:
        raise AssertionError(what)


async def converse(socket):
    text = "grüße über den Tunnel 🚇"
    await socket.send(text)
    check(await socket.recv() == text, "text differs")

    for size in SIZES:
        message = os.urandom(size)
        await socket.send(message)
        check(await socket.recv() == message, f"binary of {size} differs")

    # Three fragments, one message.
    await socket.send(part for part in ["one ", "two ", "three"])
    check(await socket.recv() == "one two three", "fragments differ")

    async def send_all():
        for number in range(SMALL_MESSAGES):
            await socket.send(f"message {number}")

    sending = asyncio.create_task(send_all())
    for number in range(SMALL_MESSAGES):
        check(await socket.recv() == f"message {number}", f"message {number} differs")
    await sending

    await (await socket.ping(b"are you there"))
    await socket.close(1000, "done")
    check(socket.close_code == 1000, f"close code {socket.close_code}")


async def run(options):
    context = tls(options)
    host, port = options.address.rsplit(":", 1)
    scheme = "wss" if context else "ws"
    fields = {"Authorization": f"Bearer {options.token}"} if options.token else None
    connection = connect(
        f"{scheme}://{options.name}:{options.port}{options.path}",
        host=host.strip("[]"),
        port=int(port),
        ssl=context,
        additional_headers=fields,
        subprotocols=options.subprotocol,
        max_size=None,
        proxy=None,
        open_timeout=60,
    )
    async with connection as socket:
        await converse(socket)
        return {"ok": True, "subprotocol": socket.subprotocol, "sizes": SIZES, "small": SMALL_MESSAGES}


def main():
    options = arguments()
    try:
        verdict = asyncio.run(asyncio.wait_for(run(options), 60))
    except InvalidStatus as refused:
        answer = refused.response
        verdict = {
            "ok": False,
            "error": str(refused),
            "status": answer.status_code,
            "fields": list(answer.headers.raw_items()),
            "body": (answer.body or b"").decode(errors="replace"),
        }
    except Exception as error:
        verdict = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    print(json.dumps(verdict))
    sys.exit(0 if verdict["ok"] else 1)


main()
