"""Tandem's Python helpers: small programs that the C++ side starts and talks to over a pipe.

They exist where the ecosystem's own library is Python and exactness matters more than speed. None
imports torch or transformers; each batches its calls, answers errors row by row and ends when its
standard input closes.
"""
