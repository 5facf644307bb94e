"""A federation of real sites: its folder, its keys, and Flower's programs started with them.

Needs the extra ``flower``.
"""
