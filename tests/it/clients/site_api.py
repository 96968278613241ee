"""Stand-in for the kube-apiserver of a site: TLS, /readyz, and what `kubectl get nodes` reads.

Arguments: address, port, certificate, key.
"""

import json
import ssl
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NODES = {"name": "nodes", "namespaced": False, "kind": "Node", "verbs": ["get", "list"]}
ANSWERS = {
    "/readyz": "ok",
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [NODES]},
    # kubectl asks for a table.
    "/api/v1/nodes": {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "columnDefinitions": [{"name": "Name", "type": "string"}],
        "rows": [{"cells": ["machine-of-the-site"]}],
    },
}


class Api(BaseHTTPRequestHandler):
    def do_GET(self):
        answer = ANSWERS.get(self.path.split("?")[0])
        body = json.dumps(answer).encode()
        self.send_response(404 if answer is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


address, port, certificate, key = sys.argv[1:]
server = ThreadingHTTPServer((address, int(port)), Api)
tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
tls.load_cert_chain(certificate, key)
server.socket = tls.wrap_socket(server.socket, server_side=True)
server.serve_forever()
