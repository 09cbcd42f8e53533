"""`tandem serve` on the demo model, as a client sees it: texts in and out, stops across tokens, streams that
equal whole answers, known prefixes that change no bit, clients that go away, refusals. Exit code 0 or 1.

    python tests/e2e/serve_test.py BUILD_FOLDER
"""

import http.client
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QUESTION = "Name three colors that one can see in a rainbow, one on each line, and nothing else."  # over a block
faults = []


def check(holds: bool, text: str) -> None:
    print(("ok    " if holds else "FAULT ") + text)
    if not holds:
        faults.append(text)


class Server:
    def __init__(self, build: pathlib.Path):
        self.process = subprocess.Popen(
            [build / "tandem", "serve", "--hf-checkpoint", MODEL, "--port", "0", "--max-running-requests", "8",
             "--device", os.environ.get("TANDEM_TEST_DEVICE", "cpu")],
            stderr=subprocess.PIPE, text=True)
        self.port = 0
        for line in self.process.stderr:
            if "serving" in line:
                self.port = int(line.rsplit(":", 1)[1].split(";")[0])
                break

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)

    def post(self, body: dict | str) -> tuple[int, bytes]:
        connection = self.connect()
        connection.request("POST", "/generate", body if isinstance(body, str) else json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()

    def generate(self, text: str, stream: bool = False, **params):
        body = {"text": CHAT.format(text), "return_logprob": True, "stream": stream, "sampling_params": params}
        status, answer = self.post(body)
        if status != 200:
            raise SystemExit(f"FAULT status {status}: {answer.decode()}")
        return answer.decode() if stream else json.loads(answer)

    def state(self) -> dict:
        connection = self.connect()
        connection.request("GET", "/get_server_info")
        return json.loads(connection.getresponse().read())["internal_states"][0]


def main() -> None:
    server = Server(pathlib.Path(sys.argv[1]).resolve())
    check(server.port > 0, f"listens on port {server.port}")
    greedy = {"temperature": 0, "max_new_tokens": 24}

    first = server.generate(QUESTION, **greedy)
    meta = first["meta_info"]
    check(len(first["text"]) > 0 and len(first["output_ids"]) == meta["completion_tokens"], f"answers: {first['text']!r}")
    check(len(meta["output_token_logprobs"]) == meta["completion_tokens"], "one log-probability a token")
    again = server.generate(QUESTION, **greedy)
    check(again["meta_info"]["cached_tokens"] >= 16, f"{again['meta_info']['cached_tokens']} tokens known again")
    check(again["meta_info"]["output_token_logprobs"] == meta["output_token_logprobs"], "and the same bits")

    # A stop that lies across tokens: from inside the second token's text to inside the fourth's.
    text = first["text"]
    stop = text[len(text) // 3:len(text) // 3 + 4]
    cut = server.generate(QUESTION, stop=[stop, "never there"], **greedy)
    check(cut["text"] == text[:text.find(stop)], f"stops before {stop!r}: {cut['text']!r}")
    check(cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}, "and says so")
    ids = cut["output_ids"]
    check(ids == first["output_ids"][:len(ids)] and len(cut["meta_info"]["output_token_logprobs"]) == len(ids),
          "ids and log-probabilities stay whole")
    kept = server.generate(QUESTION, stop=stop, no_stop_trim=True, **greedy)
    check(stop in kept["text"], "no_stop_trim keeps it")

    params = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "max_new_tokens": 16, "sampling_seed": 7}
    whole = server.generate("Tell me a story.", **params)
    check(server.generate("Tell me a story.", **params)["output_ids"] == whole["output_ids"], "a seed repeats")
    events = server.generate("Tell me a story.", stream=True, **params).split("\n\n")
    check(events[-2] == "data: [DONE]", "a stream ends with [DONE]")
    answers = [json.loads(event[6:]) for event in events[:-2]]
    check(answers[-1]["output_ids"] == whole["output_ids"] and answers[-1]["text"] == whole["text"],
          f"and equals the whole answer: {whole['text']!r}")
    check(all(b["text"].startswith(a["text"]) for a, b in zip(answers[:-2], answers[1:-1])), "its text only grows")
    only = server.generate(QUESTION, temperature=1, top_k=1, max_new_tokens=24)
    check(only["output_ids"] == first["output_ids"], "top_k 1 is greedy")
    never = server.generate("Hi", temperature=0, max_new_tokens=60, min_new_tokens=60)
    check(never["meta_info"]["completion_tokens"] == 60, "min_new_tokens keeps an answer going")

    connection = server.connect()
    connection.request("POST", "/generate", json.dumps(
        {"text": "Once", "sampling_params": {"n": 4, "max_new_tokens": 1000, "ignore_eos": True}}))
    deadline = time.monotonic() + 120
    while server.state()["num_running"] < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    check(server.state()["num_running"] == 4, "four samples run")
    connection.sock.close()
    while server.state()["num_running"] > 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    state = server.state()
    check(state["num_running"] == 0 and state["free_blocks"] == state["total_blocks"],
          "a client that goes away frees them")

    for field, value in {"top_p": 0, "stop_regex": "a*", "max_new_tokens": -1, "repetition_penalty": 0}.items():
        status, answer = server.post({"text": "Hi", "sampling_params": {field: value}})
        message = json.loads(answer)["error"]["message"]
        check(status == 400 and message.startswith(f"sampling_params.{field}"), f"refuses {field}: {message}")

    for body, part in {json.dumps({"text": "a" * 20_000_000}): "text: 20000000 bytes found, at most",
                       '{"text": "Hi", "sampling_params": {"top_p": 1e999}}': "body: not valid JSON"}.items():
        status, answer = server.post(body)
        message = json.loads(answer)["error"]["message"]
        check(status == 400 and message.startswith(part), f"refuses a body: {message}")

    server.process.send_signal(signal.SIGINT)
    check(server.process.wait(30) == 0, "ends on Ctrl-C with 0")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
