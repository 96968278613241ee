"""A gRPC app with all kinds of call and plain bytes as messages; ends when its standard input does.

No generated code: generic handlers whose serializers are the identity. Prints one line of JSON per event:
listening (port), call (method, authority, metadata, time left, names of the client's certificate), cancelled (method).
"""

import asyncio
import json
import sys

import grpc

SERVICE = "causeway.test.Echo"


def say(event, **facts):
    print(json.dumps({"event": event, **facts}), flush=True)


def begin(method, context):
    def printable(value):
        return value.hex() if isinstance(value, bytes) else value

    metadata = {name: printable(value) for name, value in context.invocation_metadata() or ()}
    names = context.auth_context().get("x509_subject_alternative_name", ())
    client = [name.decode() for name in names]
    say("call", method=method, metadata=metadata, left=context.time_remaining(), client=client)


async def unary(request, context):
    begin("Unary", context)
    return request


async def server_stream(request, context):
    begin("ServerStream", context)
    count, size = (int(number) for number in request.split())
    for number in range(count):
        yield number.to_bytes(4, "big") + bytes(size)


async def client_stream(requests, context):
    begin("ClientStream", context)
    count = size = 0
    async for request in requests:
        count += 1
        size += len(request)
    return f"{count} {size}".encode()


async def bidi(requests, context):
    begin("Bidi", context)
    async for request in requests:
        yield request


async def trailers(request, context):
    begin("Trailers", context)
    await context.send_initial_metadata((("x-first", "before"), ("x-first-bin", b"\x00\xff")))
    context.set_trailing_metadata((("x-last", "after"), ("x-last-bin", b"\xff\x00")))
    return request


async def fail(request, context):
    begin("Fail", context)
    details = (("grpc-status-details-bin", b"\x08\x09\x12\x03why"),)
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not today: 100 % ü", details)


async def hang(request, context):
    begin("Hang", context)
    try:
        await context.send_initial_metadata((("x-hanging", "yes"),))
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        say("cancelled", method="Hang")
        raise
    yield b"never"


HANDLERS = {
    "Unary": grpc.unary_unary_rpc_method_handler(unary),
    "ServerStream": grpc.unary_stream_rpc_method_handler(server_stream),
    "ClientStream": grpc.stream_unary_rpc_method_handler(client_stream),
    "Bidi": grpc.stream_stream_rpc_method_handler(bidi),
    "Trailers": grpc.unary_unary_rpc_method_handler(trailers),
    "Fail": grpc.unary_unary_rpc_method_handler(fail),
    "Hang": grpc.unary_stream_rpc_method_handler(hang),
}


def credentials(arguments):
    """With `CERT KEY` as arguments the app speaks TLS, else h2c. With `CERT KEY CA` it requires certificates of its clients."""
    cert, key, *roots = (open(path, "rb").read() for path in arguments)
    if not roots:
        return grpc.ssl_server_credentials([(key, cert)])
    return grpc.ssl_server_credentials([(key, cert)], roots[0], require_client_auth=True)


async def main():
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    )
    handlers = grpc.method_handlers_generic_handler(SERVICE, HANDLERS)
    server.add_generic_rpc_handlers((handlers,))
    if len(sys.argv) > 1:
        port = server.add_secure_port("127.0.0.1:0", credentials(sys.argv[1:]))
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say("listening", port=port)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


asyncio.run(main())
