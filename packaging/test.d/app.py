"""The app behind the edge: says hello, and at /slow and /long ten and forty digits, two a second."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import sleep


class App(BaseHTTPRequestHandler):
    def log_message(self, *_):
        """Thousands of requests would fill the journal."""

    def do_GET(self):
        bodies = {"/slow": b"0123456789", "/long": b"0123456789" * 4}
        body = bodies.get(self.path, b"hello")
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for at in range(len(body)):
            self.wfile.write(body[at : at + 1])
            if self.path in bodies:
                sleep(0.5)


ThreadingHTTPServer.request_queue_size = 128
ThreadingHTTPServer(("127.0.0.1", 9100), App).serve_forever()
