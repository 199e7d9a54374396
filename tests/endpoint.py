"""A scripted endpoint of OpenAI's form on 127.0.0.1, for tests of those who talk to one."""

import contextlib
import http.server
import json
import threading


class Scripted(http.server.ThreadingHTTPServer):
  """Answers with what `script(body, number of the request)` returns: a text to say, (status, bytes), or None to cut."""

  daemon_threads = True

  def __init__(self):
    super().__init__(("127.0.0.1", 0), _Handler)
    self.seen, self.headers, self.lock = [], [], threading.Lock()
    self.script = lambda body, number: body["messages"][-1]["content"].upper()
    self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

  def handle_error(self, request, client_address):
    pass  # connections that the test breaks


class _Handler(http.server.BaseHTTPRequestHandler):
  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    with self.server.lock:
      self.server.seen.append(body)
      self.server.headers.append(self.headers)
      number = len(self.server.seen)
    said = self.server.script(body, number)
    if said is None:
      self.connection.close()
      return
    status, data = (200, json.dumps(reply(said)).encode()) if isinstance(said, str) else said
    self.send_response(status)
    self.send_header("Content-Type", "application/json")
    self.send_header("Content-Length", str(len(data)))
    self.send_header("Retry-After-Ms", "1")
    self.end_headers()
    self.wfile.write(data)

  def log_message(self, *_):
    pass


def reply(text):
  message = {"role": "assistant", "content": text}
  usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
  choice = {"index": 0, "message": message, "finish_reason": "stop"}
  return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


@contextlib.contextmanager
def running():
  """Serves until the block ends."""
  server = Scripted()
  threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
  try:
    yield server
  finally:
    server.shutdown()
    server.server_close()
