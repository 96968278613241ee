"""An HTTP/1.1 app for large bodies, in flat memory; ends when its standard input does.

GET /N answers with N random bytes; PUT answers with the body's SHA-256.
Prints one line of JSON per event: listening (port), sent (size, sha256).
"""

import hashlib
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PART = 1 << 20


def say(event, **facts):
    print(json.dumps({"event": event, **facts}), flush=True)


class App(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        left = size = int(self.path.lstrip("/"))
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        digest = hashlib.sha256()
        while left:
            part = os.urandom(min(left, PART))
            digest.update(part)
            self.wfile.write(part)
            left -= len(part)
        say("sent", size=size, sha256=digest.hexdigest())

    def do_PUT(self):
        left = int(self.headers["Content-Length"])
        digest = hashlib.sha256()
        while left:
            part = self.rfile.read(min(left, PART))
            digest.update(part)
            left -= len(part)
        answer = digest.hexdigest().encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def main():
    server = ThreadingHTTPServer(("127.0.0.1", 0), App)
    say("listening", port=server.server_address[1])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


main()
