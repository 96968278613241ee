"""A gRPC client: makes every kind of call of grpc_server.py through a listener and prints a verdict.

The verdict is one line of JSON: "ok", and for each kind of call "ok" or the error; the exit code is 1 after an
error. The client resolves no name: the node's name goes into SNI and :authority.
"""

import argparse
import json
import queue
import sys

import grpc

SERVICE = "causeway.test.Echo"
PATIENCE = 120


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True, help="host:port to connect to")
    parser.add_argument("--name", default="edge-1", help="the node: SNI and :authority")
    parser.add_argument("--port", type=int, default=9100, help="the node's port, in :authority")
    parser.add_argument("--ca", help="root certificates; without it the connection is h2c")
    parser.add_argument("--cert", help="client certificate")
    parser.add_argument("--key", help="client key")
    parser.add_argument("--token", help="bearer token")
    parser.add_argument("--error", action="store_true", help="print code and message of a call that fails")
    return parser.parse_args()


def connect(options):
    settings = [
        ("grpc.default_authority", f"{options.name}:{options.port}"),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
    ]
    if not options.ca:
        return grpc.insecure_channel(options.address, settings)

    def content(path):
        return open(path, "rb").read() if path else None

    credentials = grpc.ssl_channel_credentials(
        content(options.ca), content(options.key), content(options.cert)
    )
    settings.append(("grpc.ssl_target_name_override", options.name))
    return grpc.secure_channel(options.address, credentials, settings)


def check(found, expected, what):
    if found != expected:
        raise AssertionError(f"{what}: {found!r} instead of {expected!r}")


def status_of(call):
    try:
        call()
    except grpc.RpcError as error:
        return error
    raise AssertionError("no error came")


class Calls:
    def __init__(self, channel, token):
        self.channel = channel
        self.metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def call(self, kind, method, request, timeout=PATIENCE, **more):
        metadata = self.metadata + more.pop("metadata", ())
        stub = getattr(self.channel, kind)(f"/{SERVICE}/{method}")
        return stub(request, timeout=timeout, metadata=metadata, **more)

    def unary(self):
        check(self.call("unary_unary", "Unary", b"hello"), b"hello", "small")
        check(self.call("unary_unary", "Unary", b""), b"", "empty")
        large = bytes(range(256)) * 12_000
        check(self.call("unary_unary", "Unary", large) == large, True, "3 MB come back")

    def server_stream(self):
        answers = list(self.call("unary_stream", "ServerStream", b"500 1000"))
        numbers = [int.from_bytes(answer[:4], "big") for answer in answers]
        check(numbers, list(range(500)), "answers in order")
        check({len(answer) for answer in answers}, {1004}, "sizes")

    def client_stream(self):
        requests = (bytes(1000) for _ in range(500))
        check(self.call("stream_unary", "ClientStream", requests), b"500 500000", "count and size")

    def bidi(self):
        """Checks that each answer arrives before the next request is sent: nothing may be held back."""
        requests = queue.SimpleQueue()
        answers = self.call("stream_stream", "Bidi", iter(requests.get, None))
        for number in range(100):
            requests.put(f"message {number}".encode())
            check(next(answers), f"message {number}".encode(), "echo")
        requests.put(None)
        check(list(answers), [], "what is left")
        check(answers.code(), grpc.StatusCode.OK, "status")

    def metadata_both_ways(self):
        stub = self.channel.unary_unary(f"/{SERVICE}/Trailers")
        sent = self.metadata + (("x-up", "there"), ("x-up-bin", b"\x00\x01"))
        answer, call = stub.with_call(b"x", timeout=PATIENCE, metadata=sent)
        check(answer, b"x", "answer")
        first, last = dict(call.initial_metadata()), dict(call.trailing_metadata())
        check((first["x-first"], first["x-first-bin"]), ("before", b"\x00\xff"), "initial metadata")
        check((last["x-last"], last["x-last-bin"]), ("after", b"\xff\x00"), "trailers")

    def error_with_details(self):
        error = status_of(lambda: self.call("unary_unary", "Fail", b""))
        check(error.code(), grpc.StatusCode.FAILED_PRECONDITION, "status")
        check(error.details(), "not today: 100 % ü", "message")
        details = dict(error.trailing_metadata())["grpc-status-details-bin"]
        check(details, b"\x08\x09\x12\x03why", "details")

    def unknown_method(self):
        error = status_of(lambda: self.call("unary_unary", "NoSuchMethod", b""))
        check(error.code(), grpc.StatusCode.UNIMPLEMENTED, "status")

    def deadline(self):
        """Waits for the deadline of a call that has begun. On a busy machine that may take a later deadline."""
        deadline, begun = 0.3, None
        while begun != "yes":
            hanging = self.call("unary_stream", "Hang", b"", timeout=deadline)
            error = status_of(lambda: list(hanging))
            check(error.code(), grpc.StatusCode.DEADLINE_EXCEEDED, "status")
            begun = dict(hanging.initial_metadata() or ()).get("x-hanging")
            deadline *= 2

    def cancel(self):
        hanging = self.call("unary_stream", "Hang", b"")
        check(dict(hanging.initial_metadata())["x-hanging"], "yes", "the call has begun")
        hanging.cancel()
        error = status_of(lambda: list(hanging))
        check(error.code(), grpc.StatusCode.CANCELLED, "status")


KINDS = [
    Calls.unary,
    Calls.server_stream,
    Calls.client_stream,
    Calls.bidi,
    Calls.metadata_both_ways,
    Calls.error_with_details,
    Calls.unknown_method,
    Calls.deadline,
    Calls.cancel,
]


def verdict_on(kind, calls):
    try:
        kind(calls)
        return "ok"
    except grpc.RpcError as error:
        return f"{error.code()}: {error.details()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main():
    options = arguments()
    with connect(options) as channel:
        calls = Calls(channel, options.token)
        if options.error:
            error = status_of(lambda: calls.call("unary_unary", "Unary", b"hello"))
            print(json.dumps({"code": error.code().name, "message": error.details()}))
            return
        verdict = {kind.__name__: verdict_on(kind, calls) for kind in KINDS}
    verdict["ok"] = all(each == "ok" for each in verdict.values())
    print(json.dumps(verdict))
    sys.exit(0 if verdict["ok"] else 1)


main()
