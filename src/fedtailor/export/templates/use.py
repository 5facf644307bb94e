"""Use the model: python use.py "some text", or the path of a picture; one or several."""

import sys

from .plain import Model

if __name__ == "__main__":
    given = sys.argv[1:] or sys.exit(__doc__)
    try:
        print(*map(Model().answer, given), sep="\n")
    except OSError as error:  # a picture is missing, or is none
        print(f"can't read {error.filename or 'a picture'}: {error}", file=sys.stderr)
        sys.exit(2)
