"""What the end-to-end tests share: a random two-layer model with the demo model's tokenizer, so that
real prompts fit and a step takes a fraction of a second, and the real program on it."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else ROOT / "build")
TANDEM = BUILD / "tandem"
MODEL = ROOT / "models/SmolLM2-135M-Instruct"
# On a GPU the tests ask for exact mode, which promises what the CPU always gives.
DEVICE = os.environ.get("TANDEM_TEST_DEVICE", "cpu")
DEVICE_FLAGS = ["--device", DEVICE, *(["--true-on-policy-mode"] if DEVICE == "cuda" else [])]
NUM_GPUS = len([path for path in pathlib.Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])


# For a test, or a part of one, that places ranks on so many GPUs.
def needs_gpus(count):
    return unittest.skipIf(lacks_gpus(count), f"not run: {NUM_GPUS} GPU")


def lacks_gpus(count, part=None):
    lacking = DEVICE == "cuda" and NUM_GPUS < count
    if lacking and part:
        print(f"{part}: not run: {NUM_GPUS} GPU")
    return lacking


HIDDEN = 256 if DEVICE == "cuda" else 48  # on a GPU heads of 64, which FlashInfer's kernels take
# Columns that differ between two equal runs: what depends on the clock, and how many prompts arrived
# before which batch.
CLOCK = ("perf/", "memory/", "time", "rollout/prefix_cache_hit_rate", "rollout/avg_cached_tokens_per_sample")


def make_model(target: pathlib.Path, *flags) -> None:
    subprocess.run([sys.executable, ROOT / "tools/make_random_model.py", target, "--tokenizer", MODEL,
                    "--hidden-size", str(HIDDEN), "--layers", "2", "--heads", "4", "--kv-heads", "2",
                    "--intermediate-size", "80", *flags], check=True)


def tiny_model(folder: pathlib.Path) -> pathlib.Path:
    target = folder / "tiny"
    make_model(target)
    return target


def tensors_of(data):
    """Metadata and integer tensors (flat lists) of a safetensors file's bytes."""
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:8 + size]), memoryview(data)[8 + size:]
    formats = {"U8": "B", "I32": "i", "I64": "q", "U64": "Q"}
    tensors = {name: body[slice(*entry["data_offsets"])].cast(formats[entry["dtype"]]).tolist()
               for name, entry in header.items() if entry.get("dtype") in formats}
    return header["__metadata__"], tensors


def processes():
    """(pid, words of the command line, parent) of every process."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if stat[0] != "Z":
            found.append((int(entry.name), words, int(stat[1])))
    return found


def children(pid):
    return [(child, words) for child, words, parent in processes() if parent == pid]


def wait_until(condition, seconds=60):
    """Whether the condition held before the time was over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


class TinyRun(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="tandem-e2e-"))
        cls.model = tiny_model(cls.folder)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def flags(self, name, *more):
        return ["train", "--hf-checkpoint", self.model, "--colocate",
                "--prompt-data", ROOT / "examples/addition/train.jsonl",
                "--input-key", "prompt", "--label-key", "label", "--apply-chat-template",
                "--rm-type", "last-number", "--num-rollout", "3", "--rollout-batch-size", "4",
                "--n-samples-per-prompt", "4", "--rollout-max-response-len", "12", "--rollout-shuffle",
                "--lr", "1e-3", "--threads-per-rank", "1", *DEVICE_FLAGS, "--run-dir", self.folder / name,
                *more]

    def run_tandem(self, *arguments, code=0, timeout=300, **options):
        done = subprocess.run([TANDEM, *map(str, arguments)], capture_output=True, text=True,
                              timeout=timeout, cwd=ROOT, **options)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def start(self, flags, log, **options):
        """The program in the background, its output in a file of that name; ended with the test."""
        with open(self.folder / log, "a") as out:
            process = subprocess.Popen([TANDEM, *map(str, flags)], stdout=out, stderr=out, cwd=ROOT,
                                       start_new_session=True, **options)
        self.addCleanup(self.end, process)
        return process

    def end(self, process):
        if process.poll() is None:
            process.kill()
            process.wait()

    def kill(self, process):
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def output(self, log):
        return (self.folder / log).read_text()

    def lines(self, name):
        path = self.folder / name / "metrics.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def rows(self, name):
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(CLOCK)}
                for line in self.lines(name)]

    def wait_for_rows(self, name, count, process=None, seconds=240):
        reached = wait_until(lambda: len(self.lines(name)) >= count
                             or (process is not None and process.poll() is not None), seconds)
        self.assertTrue(reached, f"{name}: no {count} rows within {seconds} s")
