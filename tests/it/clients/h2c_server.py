"""An HTTP/2 app by prior knowledge (h2c), exact to the frame: records, echo, trailers, resets.

Ends when its standard input does. Prints one line of JSON per event: listening (port), opened (a connection),
request (stream, fields in their order), body (stream, size), reset (stream, code).
Paths: `/reset` is reset with CANCEL after half an answer, `/trailers` ends with trailers, all others echo the body.
"""

import asyncio
import json
import sys

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2 import events


def say(event, **facts):
    print(json.dumps({"event": event, **facts}), flush=True)


class Connection(asyncio.Protocol):
    def connection_made(self, transport):
        say("opened")
        self.transport = transport
        self.engine = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self.paths, self.bodies, self.pending = {}, {}, {}
        self.engine.initiate_connection()
        self.flush()

    def data_received(self, data):
        for event in self.engine.receive_data(data):
            self.handle(event)
        for stream in list(self.pending):
            self.send_pending(stream)
        self.flush()

    def handle(self, event):
        if isinstance(event, events.RequestReceived):
            say("request", stream=event.stream_id, fields=event.headers)
            self.paths[event.stream_id] = dict(event.headers).get(":path", "")
            self.bodies[event.stream_id] = bytearray()
        elif isinstance(event, events.DataReceived):
            self.bodies[event.stream_id] += event.data
            self.engine.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, events.StreamEnded):
            self.answer(event.stream_id)
        elif isinstance(event, events.StreamReset):
            say("reset", stream=event.stream_id, code=int(event.error_code))
            self.pending.pop(event.stream_id, None)

    def answer(self, stream):
        body = bytes(self.bodies.pop(stream))
        say("body", stream=stream, size=len(body))
        path = self.paths.pop(stream)
        self.engine.send_headers(stream, [(":status", "200"), ("x-spoke", "h2c")])
        if path == "/reset":
            self.engine.send_data(stream, b"half of it")
            self.engine.reset_stream(stream, ErrorCodes.CANCEL)
            return
        self.pending[stream] = (body, [("x-last", "after")] if path == "/trailers" else None)

    def send_pending(self, stream):
        body, trailers = self.pending.pop(stream)
        while body:
            room = self.engine.local_flow_control_window(stream)
            part = body[: min(room, self.engine.max_outbound_frame_size)]
            if not part:
                self.pending[stream] = (body, trailers)
                return
            self.engine.send_data(stream, part)
            body = body[len(part) :]
        if trailers:
            self.engine.send_headers(stream, trailers, end_stream=True)
        else:
            self.engine.end_stream(stream)

    def flush(self):
        self.transport.write(self.engine.data_to_send())


async def main():
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0)
    say("listening", port=server.sockets[0].getsockname()[1])
    await asyncio.to_thread(sys.stdin.read)


asyncio.run(main())
