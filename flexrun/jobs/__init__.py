"""Batch jobs: JSON lines in, one result line per request out, safe to kill at any moment.

`runner` feeds an engine from a bounded window of input lines; a job kind says what a line means and what a
result looks like (`generation` is the kind behind ``flexrun batch``); `output` keeps the file whole and
`manifest` keeps results of different settings apart. Nothing here imports torch.
"""
