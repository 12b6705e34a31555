"""Holds states against a reference, and files against what they should hold.

``reference``: what transformers computes for the same prompts. ``rows``: compares, and says of
a row that is wrong whose it is. ``files``: goes over the files that a run wrote. ``plot``: the
errors as a picture. Used by the command line; the functions are there for scripts as well.
"""
