"""An application with the OpenTelemetry SDK, which exports traces by OTLP over gRPC to --address.

Makes as many spans as each line of its standard input says.
"""

import argparse
import sys

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

arguments = argparse.ArgumentParser()
arguments.add_argument("--address", required=True)
address = arguments.parse_args().address

# An exporter drops the spans of an outage that is longer than this, in seconds.
exporter = OTLPSpanExporter(endpoint=f"http://{address}", insecure=True, timeout=120)
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=200))
tracer = provider.get_tracer("causeway")
for line in sys.stdin:
    for number in range(int(line)):
        tracer.start_span(f"span-{number}").end()
