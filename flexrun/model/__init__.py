"""Models as data: a configuration, a table of families, and the blocks that a decoder is made of.

`flexrun.model.config`, `specs`, `mapping` and `footprint` need no torch; `assemble` and what it imports do.
"""
