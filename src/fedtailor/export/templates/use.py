"""Use the model: ``python use.py "some text"``, or a picture's path."""

import sys

from .plain import Model

if __name__ == "__main__":
    model = Model()
    for given in sys.argv[1:]:
        print(model.answer(given))
