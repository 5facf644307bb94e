"""Use the model: python use.py "some text", or the path of a picture; one or several."""

import sys

from .plain import Model

if __name__ == "__main__":
    given = sys.argv[1:] or sys.exit(__doc__)
    print(*map(Model().answer, given), sep="\n")
