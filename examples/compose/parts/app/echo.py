"""A websocket that says what it hears."""

import asyncio

import websockets


async def echo(socket):
    async for message in socket:
        await socket.send(message)


async def main():
    async with websockets.serve(echo, "127.0.0.1", 8765):
        await asyncio.Future()


asyncio.run(main())
