"""Alerts posted to a real server, and to none."""

import http.server
import json
import threading

import pytest

from pyrlstats.monitor import Alert, Webhook

ALERT = Alert(7, "growth", "stop", "a/kl_k3", "it grows", "policy update", "a", {"score": 9.0})


def test_alerts_are_posted():
    got = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        hook = Webhook(f"http://127.0.0.1:{server.server_port}/")
        hook(ALERT)
        hook.wait()
        server.shutdown()
        thread.join()
    assert hook.failed == 0
    (body,) = got
    assert body["text"] == "stop at step 7: it grows"
    assert Alert.from_json(body["alert"]) == ALERT


def test_a_server_that_is_not_there_is_counted():
    hook = Webhook("http://127.0.0.1:9/", timeout=1.0)
    hook(ALERT)
    hook(ALERT)
    hook.wait()
    assert hook.failed == 2


def test_other_urls_are_refused():
    with pytest.raises(ValueError, match="http"):
        Webhook("file:///etc/passwd")
