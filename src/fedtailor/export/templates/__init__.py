"""The code that an exported model takes along: files that import nothing of this package.

`base` builds the base model and reads its inputs. Each other file with a class ``Model`` is a form:
the forward pass that a method's client uses, as ``model.py`` of the export. Relative imports name
files that go with it; they become plain ones in the exported folder.
"""
