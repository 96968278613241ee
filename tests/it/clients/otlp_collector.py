"""A collector of OTLP over gRPC, for traces; ends when its standard input does.

Prints one line of JSON per event: listening (port), exported (number of distinct spans so far).
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


def say(event, **facts):
    print(json.dumps({"event": event, **facts}), flush=True)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self):
        self.spans = set()

    def Export(self, request, context):
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.update(span.span_id for span in scope.spans)
        say("exported", spans=len(self.spans))
        return trace_service_pb2.ExportTraceServiceResponse()


server = grpc.server(ThreadPoolExecutor(max_workers=1))
trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
say("listening", port=port)
sys.stdin.read()
server.stop(0)
