"""Use the model: python use.py "some text", a .txt file with one text a line, a .csv file, or the
path of a picture; one or several."""

import sys

from .plain import Model

if __name__ == "__main__":
    given = [one for one in sys.argv[1:] if one != "--help"] or sys.exit(__doc__)
    try:
        print(*map(Model().answer, given), sep="\n")
    except OSError as error:  # a file is missing, or is not what the model reads
        reason = error.strerror or error
        print(f"can't read {error.filename or 'a picture'}: {reason}", file=sys.stderr)
        sys.exit(2)
