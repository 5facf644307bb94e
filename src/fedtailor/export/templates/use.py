"""Use the model: ``python use.py "some text"``, or a picture's path."""

import sys

from .plain import Model

if __name__ == "__main__":
    model = Model()
    for given in sys.argv[1:]:
        if model.about["task"] == "causal-lm":
            print(model.generate(given))
            continue
        for label, p in sorted(model.predict([given])[0].items(), key=lambda pair: -pair[1]):
            print(f"{p:.3f}  {label}")
