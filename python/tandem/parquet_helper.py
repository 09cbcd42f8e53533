"""Rows of a Parquet file as lines of JSON, over the framed pipe; pyarrow reads, nothing is guessed.

    python -m tandem.parquet_helper

Requests and replies:
    {"call": "open", "path"}                 -> {"num_rows", "columns": [name]}
    {"call": "rows", "columns", "begin"}     -> {"lines": [text], "faults": {offset: text}}
`rows` answers with the next rows from `begin`, as many as one reply should hold; a line stands for each,
empty where a fault says why the row has no JSON (a NaN, bytes that are no UTF-8). Integers keep all
their digits; decimals become text with theirs, times become ISO text; a column that is absent is left
out of every row.
"""

from __future__ import annotations

import datetime
import decimal
import json
from typing import Any

from tandem import pipe

ROWS_PER_REPLY = 2048


def _plain(value: Any) -> Any:
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8")
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


class ParquetService:
    def __init__(self):
        self._table: Any = None

    def answer(self, request: dict) -> dict:
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise RuntimeError(f"Parquet needs the package pyarrow ({error}); scripts/setup.sh installs it") from error
        if request["call"] == "open":
            self._file = pyarrow.parquet.ParquetFile(request["path"])
            self._table = None
            return {"num_rows": self._file.metadata.num_rows, "columns": self._file.schema_arrow.names}
        if request["call"] == "rows":
            return self._rows(request)
        raise ValueError(f"unknown call '{request['call']}', expected open or rows")

    def _rows(self, request: dict) -> dict:
        if self._table is None:
            names = self._file.schema_arrow.names
            self._table = self._file.read(columns=[name for name in request["columns"] if name in names])
        begin = request["begin"]
        lines, faults = [], {}
        for offset, row in enumerate(self._table.slice(begin, ROWS_PER_REPLY).to_pylist()):
            try:
                lines.append(json.dumps(row, ensure_ascii=False, allow_nan=False, default=_plain))
            except (TypeError, ValueError) as error:
                lines.append("")
                faults[str(offset)] = pipe.error_text(error)
        return {"lines": lines, "faults": faults}


if __name__ == "__main__":
    pipe.serve(ParquetService().answer)
