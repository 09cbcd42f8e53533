"""Rows of a Parquet file as lines of JSON: digits, texts and structures as they were written. Needs
pyarrow, which is no part of the base setup; without it the helper's own error is tested."""

import datetime
import decimal
import json
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/unit"))
from helper_test import Helper  # noqa: E402


class Parquet(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = str(Path(self.folder.name) / "rows.parquet")

    def tearDown(self):
        self.folder.cleanup()

    def test_without_pyarrow_the_error_says_what_installs_it(self):
        code = "import sys; sys.modules['pyarrow'] = None\nimport runpy; runpy.run_module('tandem.parquet_helper', run_name='__main__')"
        with Helper(code=code) as helper:
            self.assertIn("scripts/setup.sh", helper.call({"call": "open", "path": self.path})["error"])

    def test_rows(self):
        import pyarrow as pa
        import pyarrow.parquet as pq

        messages = [{"role": "user", "content": "1 + 1 = ?"}]
        pq.write_table(pa.table({
            "prompt": pa.array([messages, messages, messages]),
            "label": pa.array([72057594038135102, 10254939386542155531, 9007199254740993], pa.uint64()),
            "metadata": pa.array([{"d": decimal.Decimal("0.10"), "when": datetime.date(2026, 1, 2)}, None, {}]),
            "score": pa.array([0.1, float("nan"), 2.5]),
            "unused": pa.array([b"\xff", b"", b""]),
        }), self.path)
        with Helper(module="tandem.parquet_helper") as helper:
            opened = helper.call({"call": "open", "path": self.path})
            self.assertEqual(opened["num_rows"], 3)
            self.assertEqual(opened["columns"], ["prompt", "label", "metadata", "score", "unused"])
            reply = helper.call({"call": "rows", "begin": 0, "columns": ["prompt", "label", "metadata", "absent"]})
            self.assertEqual(reply["faults"], {})
            first = json.loads(reply["lines"][0])
            self.assertEqual(first["prompt"], messages)
            self.assertIn('"label": 72057594038135102', reply["lines"][0])
            self.assertIn('"label": 10254939386542155531', reply["lines"][1])
            self.assertEqual(first["metadata"], {"d": "0.10", "when": "2026-01-02"})
            self.assertIsNone(json.loads(reply["lines"][1])["metadata"])
            self.assertEqual(len(helper.call({"call": "rows", "begin": 2, "columns": ["label"]})["lines"]), 1)
        with Helper(module="tandem.parquet_helper") as helper:
            helper.call({"call": "open", "path": self.path})
            reply = helper.call({"call": "rows", "begin": 0, "columns": ["score"]})
            self.assertEqual(reply["lines"][0], '{"score": 0.1}')
            self.assertEqual(list(reply["faults"]), ["1"])
        with Helper(module="tandem.parquet_helper") as helper:
            self.assertIn("nowhere.parquet", helper.call({"call": "open", "path": "nowhere.parquet"})["error"])


if __name__ == "__main__":
    sys.argv = sys.argv[:1]
    unittest.main()
