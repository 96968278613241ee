"""The app behind the edge: says hello, and at /slow ten digits in five seconds."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import sleep


class App(BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"0123456789" if self.path == "/slow" else b"hello"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for at in range(len(body)):
            self.wfile.write(body[at : at + 1])
            if self.path == "/slow":
                sleep(0.5)


ThreadingHTTPServer(("127.0.0.1", 9100), App).serve_forever()
