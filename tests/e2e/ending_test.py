"""How a run ends when something else ends it (cases C62 to C67): the driver, a rank or the tokenizer
killed, a port that is taken, an engine that is busy. Nothing of a run outlives it, and nothing that is
not of the run is touched."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest
import urllib.request

from tiny_run import TANDEM, TinyRun, children, needs_gpus, processes, wait_until

NO_END = ["--num-rollout", "5000"]


def listening_ports(pids):
    """TCP ports on which any of the processes listens."""
    inodes = set()
    for pid in pids:
        for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(fd)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not os.path.exists(table):
            continue
        for line in pathlib.Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                ports.add(int(words[1].rsplit(":", 1)[1], 16))
    return ports


def connects(port):
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Ending(TinyRun):
    def running(self, name, *flags):
        """A run that has done a step: the driver, its ranks, its helpers."""
        driver = self.start(self.flags(name, *NO_END, *flags), f"{name}.out")
        self.wait_for_rows(name, 1, driver)
        self.assertIsNone(driver.poll(), self.output(f"{name}.out"))
        of_driver = children(driver.pid)
        ranks = [pid for pid, words in of_driver if words[1:2] == ["rank"]]
        helpers = [pid for pid, words in of_driver if "tandem.tokenizer_helper" in words]
        self.assertEqual(len(helpers), 1)
        return driver, ranks, helpers

    @needs_gpus(2)
    def test_a_killed_driver_leaves_no_process_port_or_shared_memory(self):
        before = set(os.listdir("/dev/shm"))
        driver, ranks, helpers = self.running("driver", "--actor-num-gpus-per-node", "2")
        self.assertEqual(len(ranks), 2)
        ports = listening_ports([driver.pid, *ranks])
        self.assertGreaterEqual(len(ports), 2)
        self.assertTrue(any(connects(port) for port in ports))
        self.kill(driver)
        gone = lambda: not any(os.path.exists(f"/proc/{pid}") for pid in ranks + helpers)
        self.assertTrue(wait_until(gone, 5), processes())
        self.assertFalse([port for port in ports if connects(port)])
        self.assertEqual(set(os.listdir("/dev/shm")) - before, set())

    def test_a_killed_helper_is_started_again_and_changes_no_number(self):
        # The tokenizer and the processes of a reward function.
        flags = ["--num-rollout", "40", "--custom-rm-path", "examples.addition.functions.reward",
                 "--reward-key", "score"]
        driver = self.start(self.flags("helper", *flags), "helper.out")
        for rows, module in ((3, "tandem.tokenizer_helper"), (6, "tandem.function_helper"),
                             (9, "tandem.tokenizer_helper"), (12, "tandem.function_helper")):
            self.wait_for_rows("helper", rows, driver)
            for pid in [pid for pid, words in children(driver.pid) if module in words]:
                os.kill(pid, signal.SIGKILL)
        self.assertEqual(driver.wait(timeout=120), 0, self.output("helper.out"))
        text = self.output("helper.out")
        self.assertIn("starting it again", text)
        self.assertIn("functions.reward: its process ended: killed by signal 9", text)
        self.run_tandem(*self.flags("whole", *flags))
        self.assertEqual(self.rows("helper"), self.rows("whole"))
        self.assertFalse(any(row["rollout/failed_samples"] for row in self.rows("helper")))

    def test_a_function_that_hangs_does_not_outlive_the_driver(self):
        (self.folder / "hangs.py").write_text("import time\n\ndef reward(args, sample):\n    time.sleep(600)\n")
        driver = self.start(self.flags("hangs", "--custom-rm-path", "hangs.reward"), "hangs.out",
                            env={**os.environ, "PYTHONPATH": str(self.folder)})
        helpers = lambda: [pid for pid, words in children(driver.pid) if "tandem.function_helper" in words]
        self.assertTrue(wait_until(lambda: len(helpers()) == 2), self.output("hangs.out"))
        time.sleep(1)  # both are in a call
        pids = helpers()
        self.kill(driver)
        self.assertTrue(wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 5))

    @needs_gpus(2)
    def test_a_rank_killed_in_mid_rollout_ends_the_run_with_its_cause(self):
        # Answers so long that the rank is in a rollout whenever the signal comes.
        long = ["--rollout-max-response-len", "400", "--actor-num-gpus-per-node", "2"]
        driver, ranks, helpers = self.running("rank", *long)
        os.kill(ranks[1], signal.SIGKILL)
        start = time.monotonic()
        self.assertEqual(driver.wait(timeout=60), 1)
        self.assertLess(time.monotonic() - start, 30)
        text = self.output("rank.out")
        self.assertIn("rank 1", text)
        self.assertIn("killed by signal 9", text)
        gone = lambda: not any(os.path.exists(f"/proc/{pid}") for pid in ranks + helpers)
        self.assertTrue(wait_until(gone, 5))

    def test_a_rank_that_hangs_ends_the_run_at_its_deadline(self):
        # Stopped, not dead: its sockets stay open, and only the limit ends the wait (case C64's other half).
        limits = ["--request-timeout-seconds", "10", "--control-timeout-seconds", "10"]
        driver, ranks, helpers = self.running("stuck", *limits)
        os.kill(ranks[0], signal.SIGSTOP)
        self.addCleanup(lambda: os.path.exists(f"/proc/{ranks[0]}") and os.kill(ranks[0], signal.SIGCONT))
        self.assertEqual(driver.wait(timeout=90), 1)
        self.assertRegex(self.output("stuck.out"), r"after 1\d(\.\d+)? s|within 10")
        gone = lambda: not any(os.path.exists(f"/proc/{pid}") for pid in ranks + helpers)
        self.assertTrue(wait_until(gone, 5))

    def test_a_signal_while_it_starts_ends_it_at_once(self):
        for number in (signal.SIGINT, signal.SIGHUP):
            name = f"starts-{number}"
            driver = self.start(self.flags(name), name + ".out")
            self.assertTrue(wait_until(lambda: any("rank" in words for _, words in children(driver.pid))))
            pids = [pid for pid, _ in children(driver.pid)]
            driver.send_signal(number)
            self.assertEqual(driver.wait(timeout=10), 130)
            self.assertIn("interrupted", self.output(name + ".out"))
            self.assertTrue(wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 5))

    def test_output_to_a_full_disk_is_a_failure(self):
        for command in (["flags"], ["score", "--help"], ["inspect", self.model]):
            with open("/dev/full", "w") as full:
                done = subprocess.run([TANDEM, *command], stdout=full, stderr=subprocess.PIPE, text=True)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("standard output: No space left on device", done.stderr)

    def test_what_is_not_of_the_run_is_left_alone(self):
        # A process that looks like ours, and a second run in the same folder of models.
        stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # tandem rank"])
        self.addCleanup(self.end, stranger)
        other, other_ranks, other_helpers = self.running("other")
        driver, ranks, helpers = self.running("mine")
        driver.send_signal(signal.SIGINT)
        self.assertEqual(driver.wait(timeout=30), 130)
        third, _, _ = self.running("third")
        self.kill(third)
        rows = len(self.lines("other"))
        self.wait_for_rows("other", rows + 2, other)
        self.assertIsNone(other.poll())
        self.assertIsNone(stranger.poll())
        self.assertTrue(all(os.path.exists(f"/proc/{pid}") for pid in other_ranks + other_helpers))

    def test_a_taken_port_is_named_at_once(self):
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with socket.socket(family) as listener:
                try:
                    listener.bind((host, 0))
                except OSError as error:
                    print(f"no {host} on this machine: {error}")
                    continue
                listener.listen()
                port = listener.getsockname()[1]
                out = self.run_tandem("serve", "--hf-checkpoint", self.model, "--port", port, code=1)
                self.assertIn(str(port), out)

    def serve(self, name, *flags):
        process = self.start(["serve", "--hf-checkpoint", self.model, "--port", "0", *flags], name)
        self.assertTrue(wait_until(lambda: "http://" in self.output(name)), self.output(name))
        return process, self.output(name).split("http://")[1].split(";")[0].strip()

    def test_two_engines_started_together_get_ports_of_their_own(self):
        (a, first), (b, second) = self.serve("a.out"), self.serve("b.out")
        self.assertNotEqual(first, second)
        for address in (first, second):
            self.assertEqual(urllib.request.urlopen(f"http://{address}/health", timeout=5).status, 200)

    def test_a_busy_engine_answers_for_its_health(self):
        process, address = self.serve("busy.out", "--threads-per-rank", "1")
        body = json.dumps({"text": "What is 1 + 1?", "sampling_params":
                           {"max_new_tokens": 3000, "ignore_eos": True}}).encode()
        request = urllib.request.Request(f"http://{address}/generate", body,
                                         {"Content-Type": "application/json"})
        done = threading.Event()

        def generate():
            urllib.request.urlopen(request, timeout=120).read()
            done.set()

        thread = threading.Thread(target=generate)
        thread.start()
        asked = 0
        while not done.wait(0.05):
            self.assertEqual(urllib.request.urlopen(f"http://{address}/health", timeout=5).status, 200)
            asked += 1
        thread.join()
        self.assertGreater(asked, 3)


if __name__ == "__main__":
    unittest.main(verbosity=2)
