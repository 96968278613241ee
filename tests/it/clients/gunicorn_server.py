"""gunicorn with its default configuration, and an application that redirects clients of http to https.

Prints one line of JSON, listening (port), once it serves.
"""

import json

from gunicorn.app.base import BaseApplication


def application(environ, start_response):
    if environ["wsgi.url_scheme"] != "https":
        location = "https://" + environ["HTTP_HOST"] + environ["PATH_INFO"]
        start_response("301 Moved Permanently", [("Location", location), ("Content-Length", "0")])
        return []
    body = f"secure for {environ['HTTP_X_FORWARDED_FOR']}".encode()
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
    return [body]


def listening(server):
    port = server.LISTENERS[0].sock.getsockname()[1]
    print(json.dumps({"event": "listening", "port": port}), flush=True)


class Server(BaseApplication):
    def load_config(self):
        self.cfg.set("bind", ["127.0.0.1:0"])
        self.cfg.set("when_ready", listening)
        self.cfg.set("control_socket_disable", True)

    def load(self):
        return application


Server().run()
